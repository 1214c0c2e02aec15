"""The RMS norm of heads that stand side by side in a row, in place: x = x / sqrt(mean(x**2) + eps) * weight."""
