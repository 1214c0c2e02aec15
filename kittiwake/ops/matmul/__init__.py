"""Products with weights, the sum over K in one order whatever the number of rows.

``y[r, n] = sum_k x[r, k] * weight[k, n]`` in float32: fused multiply-adds over k in order, in blocks of ``k_block``; a
block starts from zero and block sums are added in order. Any implementation with that definition gives the same bits
for a row, however many rows stand beside it.
"""
