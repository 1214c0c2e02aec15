"""A mixture of experts: a router picks k of E small feed-forward blocks for every row and weighs them.

    p        = softmax(logits)                         over all E experts
    chosen   = the k experts of largest p              ties: the lowest index; in falling order
    shares   = p[chosen] / max(sum p[chosen], 2**-14)  or p[chosen] as it is
    expert   = W_down (silu(W_gate x) * W_up x)
    out      = sum of shares * expert in that order + sigmoid(g) * shared

A row's product with an expert is the product that :mod:`kittiwake.ops.matmul` defines, with the bits it has for that row
alone; rows are only brought together so that an expert's weights are read once for all of them.

Sources: transformers, models/qwen4_exp/modeling_qwen4_exp.py (``Qwen4ExpTextTopKRouter``, ``Qwen4ExpTextExperts``,
``Qwen4ExpTextSparseMoeBlock``); the smallest sum: gufo.
"""
