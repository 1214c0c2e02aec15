"""Which rows of an n-gram table a token reads: hashes of it and the tokens before it.

A token's window is itself and the ``n - 1`` tokens before it; walking back, the first one that is missing or the end
token turns itself and everything older into the end token (the token's own end does not cut its window). For each order
``m`` from 2 to ``n`` the ids are multiplied by fixed odd numbers and xored; the row of head ``g`` of that order is the
mixed number modulo a prime of the head, plus the head's first row.

Source: transformers, models/qwen4_exp, ``Qwen4ExpTextNGramEmbedding``.
"""
