"""What an n-gram layer adds to a residual of several streams: gated values of a token's n-gram rows, and their convolution.

For each stream ``s`` of M, with ``k_s`` its key, ``v`` the value all streams share and ``x_s`` the residual::

    d_s = norm(k_s) . norm(x_s) / sqrt(C)        g_s = sigmoid(sign(d_s) sqrt(max(|d_s|, 1e-6))) v
    x += g + silu(conv(norm(g)))                 conv: causal, by channel, dilated; it carries the rows norm(g) before

Norms are RMS norms of each stream by itself, with weights [M C]; sign(0) is 0. The key and value are products of the
token's rows, side by side.

Source: transformers, models/qwen4_exp, ``Qwen4ExpTextPLELayer``.
"""
