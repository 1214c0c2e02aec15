"""Ops: each folder holds the readable float32 reference, shared cases and the fast implementations.

Shape letters, fixed here once:

``N`` packed rows · ``B`` sequences · ``T`` tokens of one sequence · ``H`` heads · ``K`` key dim of a head ·
``V`` value dim of a head · ``C`` width · ``L`` layers · ``S`` slots (the scratch slot included) · ``W`` wanted rows.

In products, ``[N, K]`` is a stored weight (N outputs, K inputs) and ``[K, N]`` its transpose; there ``R`` counts rows.
"""
