"""Short causal convolutions over tokens, every channel by itself, with the raw rows before carried in the state.

    out[t, c] = activation(sum_k weight[k, c] * x[t - dilation * (taps - 1 - k), c])        rows before the first: state

The state of a sequence is its last (taps - 1) * dilation rows of x, oldest first; a cleared slot holds zeros.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py (``causal_conv1d_fn``, ``Qwen4ExpTextPLELayer._short_conv``).
"""
