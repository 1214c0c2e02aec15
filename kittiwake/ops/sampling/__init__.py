"""Drawing a token from a row of logits, the same whatever stands beside the row.

In order: ban (logits at minus infinity), greedy if temperature is 0 (ties to the lowest id), divide by temperature, keep
``top_k`` (ties at the border kept), keep the smallest set of the likeliest that holds ``top_p`` of what is left (ties
kept), draw by the inverse of the cumulative distribution in id order with one uniform number.

That number comes from a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
keyed by the seed, counted by the position of the token drawn.
"""
