"""Log-probabilities of a row of logits: the one implementation that generation and scoring share.

``log p[v] = (x[v] - max x) - log(sum over u of e**(x[u] - max x))`` in float64 from float32 logits. The sum runs in one
order for a row, whatever stands beside it: eight interleaved chains over the ids, then pairs. A logit of minus infinity
(a banned token) has the log-probability minus infinity; a row that holds NaN or plus infinity, or nothing finite, gives
NaN throughout.
"""
