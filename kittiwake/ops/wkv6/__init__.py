"""WKV-6, the recurrence of RWKV-6, and of RWKV-5, whose decays do not change from token to token.

Per head, with the state S as [K, V] (key rows, value columns):

    y = r^T (diag(u) k v^T + S)                 the old state is read; u, the bonus, weighs the token itself
    S = diag(w) S + k v^T                       w = exp(-exp(d)), anywhere from 0 to 1

Source: RWKV-LM, RWKV-v5/src/model.py ("x052" and "x060"); "Eagle and Finch" (arXiv 2404.05892), sections 3 and 4.
"""
