"""The gated delta rule on CUDA: serial over tokens in float32, prompts and decoding through the same kernels.

    gated_delta(qkv, key_heads, z, a, b, rates, bias, norm, eps, is_silu, starts, slots, state, made, out, *, overlap)
    made_columns(key_heads, value_heads, keys, values) -> columns of ``made``, float32 room for the rows of the launch

Three launches. ``prepare``, parallel over rows: q and k of length 1, their product, v, and both gates, all in float32, in
``made``. ``scan``: a program of one warp takes a sequence, a value head and a few value columns; it holds its columns of the
state in registers and reads and writes them once, whatever the number of rows, and the rows to come are on their way while
one is worked on. ``finish``, parallel over rows: the norm and the gate of what the scan left in place of v.

The scan reads the new state by way of the old one, q^T S = decay q^T S_old + (q^T k) delta, so that both sums over keys run
side by side, and only one of the two waits of a token is left.

Value heads are grouped (``heads.py``): those of a key head stand side by side.

Which lanes hold which keys, and so the order of the sums over keys, follows from the tile, and that from K and V alone.
Every launch of the scan is the same machine code, whose loop stands in it once: the compiler may fuse a product with a
sum there, since it does so once for all rows. The other two kernels do not contract.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.triton_launch import launch_options
from kittiwake.ops.triton_math import quick_sigmoid

COLUMNS = 16
"""Most value columns of a program of the scan."""
TILE = 4096
"""Most values of a state that a program of the scan holds: 128 in a thread."""
STAGES = 4
"""Rows on their way to a program of the scan, the one worked on among them."""
PART = 1024
"""About how many values a program of the other kernels takes."""
COPIES = 4
"""Times that numbers which all columns of a head share are written: 16 bytes, the most that a thread loads at once."""
KEY_EPS = 1e-6


@triton.jit
def _softplus(x):
    """ln(1 + e**x); small results keep their relative precision: ln(1 + y) = 2 artanh(y / (y + 2)), as a series."""
    y = tl.exp(-tl.abs(x))
    s = y / (y + 2.0)
    z = s * s
    p = z * 0.06666667 + 0.07692308
    p = p * z + 0.09090909
    p = p * z + 0.11111111
    p = p * z + 0.14285715
    p = p * z + 0.2
    p = p * z + 0.33333334
    return 2.0 * s * (p * z + 1.0) + tl.maximum(x, 0.0)


@triton.jit
def _unit(x, scale, eps):
    """x [heads, K] * scale / sqrt(sum x**2 + eps)."""
    return x * (scale / tl.sqrt_rn(tl.sum(x * x, 1) + eps))[:, None]


@triton.jit
def _store_copies(to, heads, values, COUNT: tl.constexpr, COPIES: tl.constexpr):
    """values [heads] → to [COUNT, COPIES]."""
    at = to + heads[:, None] * COPIES + tl.arange(0, COPIES)[None, :]
    tl.store(at, tl.broadcast_to(values[:, None], at.shape), mask=(heads < COUNT)[:, None])


@triton.jit
def _make_keys(
    row, to, products_at, heads, scale, eps, K: tl.constexpr, KEYS: tl.constexpr, KEY_HEADS: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Queries (times scale) and keys of some heads, of length 1, and the products of the two."""
    keys = tl.arange(0, KEYS)
    inside = (heads < KEY_HEADS)[:, None] & (keys < K)[None, :]
    at = heads[:, None] * K + keys[None, :]
    q = _unit(tl.load(row + at, mask=inside, other=0.0).to(tl.float32), scale, eps)
    k = _unit(tl.load(row + KEY_HEADS * K + at, mask=inside, other=0.0).to(tl.float32), 1.0, eps)
    tl.store(to + at, q, mask=inside)
    tl.store(to + KEY_HEADS * K + at, k, mask=inside)
    _store_copies(products_at, heads, tl.sum(q * k, 1), KEY_HEADS, COPIES)


@triton.jit
def _make_gates(
    a, b, rates, bias, to, VALUE_HEADS: tl.constexpr, GATES: tl.constexpr, COPIES: tl.constexpr
):  # fmt: skip
    """The decay of every head, and beta."""
    heads = tl.arange(0, GATES)
    has = heads < VALUE_HEADS
    step = tl.load(a + heads, mask=has, other=0.0).to(tl.float32) + tl.load(bias + heads, mask=has, other=0.0)
    decay = tl.exp(-tl.load(rates + heads, mask=has, other=0.0) * _softplus(step))
    beta = quick_sigmoid(tl.load(b + heads, mask=has, other=0.0).to(tl.float32))
    _store_copies(to, heads, decay, VALUE_HEADS, COPIES)
    _store_copies(to + VALUE_HEADS * COPIES, heads, beta, VALUE_HEADS, COPIES)


@triton.jit
def prepare_kernel(
    qkv,  # [N, 2 KEY_HEADS K + VALUE_HEADS V]: q | k | v
    a,  # [N, VALUE_HEADS]
    b,  # [N, VALUE_HEADS]
    rates,  # float32 [VALUE_HEADS]
    bias,  # float32 [VALUE_HEADS]
    made,  # float32 [N, q | k | v | decay | beta | q^T k], the last three COPIES times over, written
    qkv_stride,
    a_stride,
    b_stride,
    made_stride,
    scale,  # of queries
    key_eps,
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,  # K rounded up to a power of two
    HEADS: tl.constexpr,  # key heads of a program
    GATES: tl.constexpr,  # VALUE_HEADS rounded up
    BLOCK: tl.constexpr,  # columns of v of a program
    COPIES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    KEY_PARTS: tl.constexpr = (KEY_HEADS + HEADS - 1) // HEADS
    BEFORE: tl.constexpr = 2 * KEY_HEADS * K
    WIDTH: tl.constexpr = VALUE_HEADS * V
    GATES_AT: tl.constexpr = BEFORE + WIDTH
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = qkv + n * qkv_stride
    to = made + n * made_stride
    if part < KEY_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        products_at = to + GATES_AT + 2 * VALUE_HEADS * COPIES
        _make_keys(row, to, products_at, heads, scale, key_eps, K, KEYS, KEY_HEADS, COPIES)
    else:
        columns = (part - KEY_PARTS) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(row + BEFORE + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        tl.store(to + BEFORE + columns, v, mask=columns < WIDTH)
        if part == KEY_PARTS:
            _make_gates(a + n * a_stride, b + n * b_stride, rates, bias, to + GATES_AT, VALUE_HEADS, GATES, COPIES)


@triton.jit(do_not_specialize_on_alignment=["starts", "slots", "state"])
def scan_kernel(
    made,  # float32 as above; o is written in place of v
    starts,  # int32 [B + 1]
    slots,  # int32 [B]
    state,  # float32 [S, VALUE_HEADS, K, V]
    made_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,  # K rounded up to a power of two
    COLUMNS: tl.constexpr,  # value columns of this program
    COPIES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    keys = tl.arange(0, KEYS)
    has_key = keys < K
    has_column = columns < V
    inside = has_key[:, None] & has_column[None, :]
    first = tl.load(starts + sequence)
    last = tl.load(starts + sequence + 1)
    slot = tl.load(slots + sequence).to(tl.int64)
    own_head = state + (slot * VALUE_HEADS + head) * (K * V)
    if (
        K * V % 4 == 0
    ):  # told by the sizes alone: where a table begins is no reason for another kernel, which may round else
        own_head = tl.multiple_of(own_head, 16)
    own = own_head + keys[:, None] * V + columns[None, :]
    s = tl.load(own, mask=inside & (first < last), other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # all above was written before the kernel in front began
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    q_at = made + key_head * K + keys
    v_at = made + 2 * KEY_HEADS * K + head * V + columns
    # a number for all columns is read as a vector, so that it comes as early as the rest; a thread has COPIES columns
    gates = made + 2 * KEY_HEADS * K + VALUE_HEADS * V + columns % COPIES
    decay_at = gates + head * COPIES
    beta_at = gates + (VALUE_HEADS + head) * COPIES
    product_at = gates + (2 * VALUE_HEADS + key_head) * COPIES
    begin = first.to(tl.int64)
    for i in tl.range(first, last, num_stages=STAGES):
        at = (begin + (i - first)) * made_stride
        q = tl.load(q_at + at, mask=has_key, other=0.0)[:, None]
        k = tl.load(q_at + at + KEY_HEADS * K, mask=has_key, other=0.0)[:, None]
        v = tl.load(v_at + at, mask=has_column, other=0.0)
        decay = tl.load(decay_at + at)
        beta = tl.load(beta_at + at)
        product = tl.load(product_at + at)
        recalled = tl.sum(s * k, 0)
        known = tl.sum(s * q, 0)
        delta = tl.fma(-decay, recalled, v) * beta
        s = tl.fma(k, delta[None, :], s * decay[None, :])
        tl.store(v_at + at, tl.fma(product, delta, known * decay), mask=has_column)
    tl.store(own, s, mask=inside & (first < last))


@triton.jit
def finish_kernel(
    made,  # float32, what the scan left
    z,  # [N, VALUE_HEADS V], logits of the gate
    norm,  # float32 [V]
    out,  # [N, VALUE_HEADS V], written
    made_stride,
    z_stride,
    out_stride,
    eps,
    BEFORE: tl.constexpr,  # columns of ``made`` before those of o
    V: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUES: tl.constexpr,  # V rounded up to a power of two
    HEADS: tl.constexpr,  # value heads of a program
    IS_SILU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    values = tl.arange(0, VALUES)
    inside = (heads < VALUE_HEADS)[:, None] & (values < V)[None, :]
    weight = tl.load(norm + values, mask=values < V, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = heads[:, None] * V + values[None, :]
    o = tl.load(made + n * made_stride + BEFORE + at, mask=inside, other=0.0)
    logit = tl.load(z + n * z_stride + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(o * o, 1) / V + eps)
    gate = quick_sigmoid(logit)
    if IS_SILU:
        gate = gate * logit
    found = o * factor[:, None] * weight[None, :] * gate
    tl.store(out + n * out_stride + at, found.to(out.dtype.element_ty), mask=inside)


def made_columns(key_heads: int, value_heads: int, keys: int, values: int) -> int:
    """Columns of the room that :func:`gated_delta` works in, float32: q, k, v or o, two gates and q^T k of every row."""
    return key_heads * (2 * keys + COPIES) + value_heads * (values + 2 * COPIES)


def tile(keys: int, values: int) -> dict[str, int]:
    """The part of a state [K, V] that a program of the scan holds, K whole."""
    padded = triton.next_power_of_2(keys)
    return {"KEYS": padded, "COLUMNS": max(1, min(COLUMNS, triton.next_power_of_2(values), TILE // padded))}


def _heads_at_once(count: int, size: int) -> int:
    """Heads of so many values that a program of the parallel kernels takes: about PART values."""
    return max(1, min(PART // triton.next_power_of_2(size), triton.next_power_of_2(count)))


def gated_delta(
    qkv: torch.Tensor,
    key_heads: int,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    is_silu: bool,
    starts: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    made: torch.Tensor,
    out: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """One layer's recurrence between its products, for packed rows; nk = ``key_heads`` key heads, nv value heads.

    qkv [N, 2 nk K + nv V] holds q | k | v after the convolution; z [N, nv V] and a, b [N, nv] are the logits of the output's
    gate, the decay and beta; rates (exp(A_log)) and bias float32 [nv]; norm float32 [V], of eps ``eps``; starts int32
    [B + 1], slots int32 [B]. state float32 [slots + 1, nv, K, V], contiguous, moves on; made float32
    [N, made_columns(...)] is room to work in; out [N, nv V] is written. qkv, z, a, b, made and out may be columns of
    wider rows, of any float dtype but made.
    """
    rows, (_, heads, keys, values) = qkv.shape[0], state.shape
    assert made.shape[1] >= made_columns(key_heads, heads, keys, values) and heads % key_heads == 0
    options = launch_options(overlap)
    sizes = {"K": keys, "V": values, "KEY_HEADS": key_heads, "VALUE_HEADS": heads, "COPIES": COPIES}
    held = tile(keys, values)
    at_once, block = _heads_at_once(key_heads, keys), min(PART, triton.next_power_of_2(heads * values))
    parts = triton.cdiv(key_heads, at_once) + triton.cdiv(heads * values, block)
    prepare_kernel[(rows, parts)](
        qkv,
        a,
        b,
        rates,
        bias,
        made,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        made.stride(0),
        keys**-0.5,
        KEY_EPS,
        KEYS=held["KEYS"],
        HEADS=at_once,
        GATES=triton.next_power_of_2(heads),
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
        **sizes,
        **options,
    )
    scan_kernel[(triton.cdiv(values, held["COLUMNS"]), heads, slots.shape[0])](
        made, starts, slots, state, made.stride(0), STAGES=STAGES, num_warps=1, **held, **sizes, **options
    )
    at_once = _heads_at_once(heads, values)
    finish_kernel[(rows, triton.cdiv(heads, at_once))](
        made,
        z,
        norm,
        out,
        made.stride(0),
        z.stride(0),
        out.stride(0),
        eps,
        BEFORE=2 * key_heads * keys,
        V=values,
        VALUE_HEADS=heads,
        VALUES=triton.next_power_of_2(values),
        HEADS=at_once,
        IS_SILU=is_silu,
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )
