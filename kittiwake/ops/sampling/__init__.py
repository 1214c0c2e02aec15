"""Drawing a token from a row of logits, the same whatever stands beside the row.

In order: bias (a bias of minus infinity bans), repetition penalty, presence and frequency penalties; greedy if the
temperature is 0 (ties to the lowest id); divide by the temperature; keep ``top_k`` (ties at the border kept); keep the
smallest set of the likeliest that holds ``top_p`` of what is left (ties kept); keep what has at least ``min_p`` of the
likeliest's probability; draw by the inverse of the cumulative distribution in id order with one uniform number. With
``filters_first`` the three filters look at the probabilities before the temperature instead, each at all of them.

That number comes from a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
keyed by the seed, counted by the position of the token drawn.
"""
