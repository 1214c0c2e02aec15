"""WKV-4, the recurrence of RWKV-4: per channel, a weighted mean of values whose weights decay with their age.

    y = (sum_i e^(k_i + age_i w) v_i + e^(u + k) v) / (the same sums of the weights alone)        w < 0, age_i from 0

The sums over the past are kept as (num, den, top), meaning num e^top and den e^top, where top is the largest exponent
so far: every factor that is formed lies in [0, 1], however large the keys are. The state of a sequence that has seen
nothing is (0, 0, EMPTY_TOP).

Source: RWKV-LM, RWKV-v4/cuda/wkv_cuda.cu (``kernel_forward``); "RWKV: Reinventing RNNs for the Transformer Era"
(arXiv 2305.13048), appendix on the numerically safe form.
"""

EMPTY_TOP = -1e38
"""The largest exponent of nothing: any key is larger. From 0 instead, a first key below -104 would underflow to 0 / 0."""
