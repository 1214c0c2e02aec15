"""WKV-7, the recurrence of RWKV-7: a generalised delta rule with a decay for every key channel.

Per head, with the state S as [K, V] (key rows, value columns; BlinkDL's files have [V, K]):

    sa = a^T S                                  a = -kk, the removal key
    S  = diag(w) S + b sa^T + k v^T             b = kk * a_gate
    y  = r^T S                                  the new state is read

Source: RWKV-LM, RWKV-v7/rwkv_v7_numpy.py; "RWKV-7 Goose" (arXiv 2503.14456), equations of section 4.
"""
