"""Hyper-connections with a gated mix: a residual of S streams, from which a block reads one row and to which it adds one.

    N   = GroupedNorm(R)                     every stream R_s normalised by itself, one weight over all S C channels
    low = silu(W_down N / S)
    m   = mean over s of N_s * sigmoid((W_up low)_s)          what the block reads, C channels
    j   = W_inject N                                          S logits, from the same N
    R_s = R_s + y * 2 sigmoid(j_s / S)                        y is what the block put out

Here stands what goes on around the products. The residual that is added to is R itself, not N.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py (``Qwen4ExpTextGatedResidual``, ``Qwen4ExpTextRMSNorm``).
"""
