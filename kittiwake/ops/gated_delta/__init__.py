"""The gated delta rule of Gated DeltaNet, with the gates before it and the gated norm after it.

Per value head, with the state S as [K, V] (key rows, value columns), q and k brought to length 1 first:

    decay = exp(-rate * softplus(a + dt_bias))      rate = exp(A_log)
    beta  = sigmoid(b)
    u     = k^T (decay S)                           what the key recalls
    S     = decay S + k (beta (v - u))^T
    o     = q^T S / sqrt(K)                         the new state is read
    out   = rms_norm(o) * gate(z)                   gate: sigmoid or silu

Several value heads may share a key head; :mod:`kittiwake.ops.gated_delta.heads` says which.

Sources: "Gated Delta Networks" (arXiv 2412.06464), equation 10; transformers, models/qwen4_exp/modeling_qwen4_exp.py
(``torch_recurrent_gated_delta_rule``, ``Qwen4ExpTextGatedDeltaNet``).
"""
