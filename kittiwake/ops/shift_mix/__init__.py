"""Layer norm, token shift and mixes of packed rows: what opens every time mix and channel mix of RWKV-4 to RWKV-7.

``x += y`` (the block before), ``n = layer_norm(x)``, ``p = n of the token before`` (from the state for a sequence's
first row), ``out[m] = n + (p - n) * mix[m]``; the state then holds n of each sequence's last row.
"""
