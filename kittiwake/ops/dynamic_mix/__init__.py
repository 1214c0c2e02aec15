"""The data-dependent token shift that opens RWKV-6's time mix, on both sides of the low-rank products between its halves.

``n`` and ``p`` are a token's normed row and the one before it, as in :mod:`kittiwake.ops.shift_mix`. First ``d = p - n``
and ``z = n + d * mix_x``; the products make five rows ``low[m]`` of z; then ``out[m] = n + d * (mix[m] + low[m])``.

Source: RWKV-LM, RWKV-v5/src/model.py ("x060"); arXiv 2404.05892, section 4.1.
"""
