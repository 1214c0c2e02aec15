"""The only door to products with weights.

A :class:`LinearGroup` holds products that read the same buffer. Narrow batches go through our K-in-order kernel, wide
ones through torch's matrix product, padded to a multiple of four rows; the load-time probe (``layers/probe.py``) takes
torch only where it has the very same bits. See docs/exactness.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from kittiwake.errors import ModelError
from kittiwake.ops.jit import start_threads
from kittiwake.ops.matmul.cpu import ACTIVATIONS, STRIP, WIDE_STRIP, activate_columns, group_product

ROW_MULTIPLE = 4
"""torch's float32 product gives a row the same bits at every row count that is a multiple of this."""
WIDE_ROWS = 512
"""Most rows torch is given at once: the probe covers counts up to here."""
WIDE_COLUMNS = 8192
"""Most columns torch is given at once: bounds the buffer that bfloat16 weights are widened into."""
_SHARE_COLUMNS = 16
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}


def padded(rows: int) -> int:
    """The next multiple of four: how many rows every buffer has."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


@contextmanager
def threads_in_force(threads: int) -> Iterator[None]:
    """Run the body with this many threads in torch and Numba, then put both back."""
    start_threads()
    torch_before, numba_before = torch.get_num_threads(), numba.get_num_threads()
    if torch_before != threads:
        torch.set_num_threads(threads)
    if numba_before != threads:
        numba.set_num_threads(threads)
    try:
        yield
    finally:
        if torch_before != threads:
            torch.set_num_threads(torch_before)
        if numba_before != threads:
            numba.set_num_threads(numba_before)


@dataclass(frozen=True)
class Pick:
    """What the probe found for products of one shape: the block of the sum over K, and where torch takes over."""

    k_block: int
    wide_from: int
    """Rows from which torch's product is used; 0: never, our kernel serves every row count."""


@dataclass(frozen=True)
class Product:
    """One weight of a group: [columns, depth] as stored (N outputs, K inputs), reading x from ``x_column`` on."""

    name: str
    depth: int
    columns: int
    x_column: int
    activation: str = "none"


class Workspace:
    """Named float32 buffers that grow to the largest batch seen and are used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}
        self.lock = threading.Lock()
        """Held by a forward: buffers of one model serve one batch at a time."""

    def get(self, name: str, rows: int, columns: int) -> np.ndarray:
        """Float32 [padded(rows), columns]; rows beyond ``rows`` are zero, the others hold what they held."""
        size = padded(rows) * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, dtype=np.float32)
        view = buffer[:size].reshape(padded(rows), columns)
        view[rows:] = 0
        return view

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class LinearGroup:
    """Products that share an input buffer and write one output buffer, side by side in the order given."""

    def __init__(
        self, products: Sequence[Product], picks: dict[tuple[int, int], Pick], dtype: str, threads: int
    ) -> None:
        self.products = tuple(products)
        self.columns = sum(p.columns for p in products)
        """Columns of the output."""
        self._picks = [picks[p.depth, p.columns] for p in products]
        # one switch for the whole group, set by its largest weight
        largest = max(range(len(self.products)), key=lambda i: self.products[i].depth * self.products[i].columns)
        self.wide_from = self._picks[largest].wide_from
        self._proved = [index for index, pick in enumerate(self._picks) if pick.wide_from]
        unproved = [index for index, pick in enumerate(self._picks) if not pick.wide_from]
        self._weights = torch.empty(sum(p.depth * p.columns for p in products), dtype=STORED[dtype])
        self._flat = (self._weights.view(torch.uint16) if dtype == "bf16" else self._weights).numpy()
        self._table = self._make_table()
        self._shares = _share_out(self.products, range(len(self.products)), threads)
        self._unproved_shares = _share_out(self.products, unproved, threads) if unproved else None
        self._loaded: set[str] = set()

    def _make_table(self) -> np.ndarray:
        rows, weight, y_column = [], 0, 0
        for p, pick in zip(self.products, self._picks, strict=True):
            activation = ACTIVATIONS.index(p.activation)
            rows.append((p.x_column, p.depth, p.columns, weight, y_column, pick.k_block, activation))
            weight += p.depth * p.columns
            y_column += p.columns
        return np.asarray(rows, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: what one pass over the group reads."""
        return self._weights.numel() * self._weights.element_size()

    def weight(self, index: int) -> torch.Tensor:
        """The weight of a product as kept, [K, N], a view."""
        p, offset = self.products[index], int(self._table[index, 3])
        return self._weights[offset : offset + p.depth * p.columns].view(p.depth, p.columns)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a weight [N, K] into its place, transposed and rounded to the group's dtype."""
        for index, p in enumerate(self.products):
            if p.name == name:
                if tuple(tensor.shape) != (p.columns, p.depth):
                    raise ModelError(f"{name} has shape {tuple(tensor.shape)}, expected {(p.columns, p.depth)}")
                self.weight(index).copy_(tensor.t())
                self._loaded.add(name)
                return
        raise ModelError(f"{name} is not a weight of this group: {[p.name for p in self.products]}")

    def check_loaded(self) -> None:
        """Raise ModelError when a weight was never loaded."""
        missing = [p.name for p in self.products if p.name not in self._loaded]
        if missing:
            raise ModelError(f"weights missing: {', '.join(missing)}")

    def __call__(self, x: np.ndarray, rows: int, y: np.ndarray) -> np.ndarray:
        """x float32 [padded(rows), X] → y [padded(rows), columns] (written and returned), activations applied."""
        if self.wide_from and rows >= self.wide_from:
            self.run_wide(x, rows, y)
        else:
            self.run_narrow(x, rows, y)
        return y

    def run_narrow(self, x: np.ndarray, rows: int, y: np.ndarray) -> None:
        """All products in one launch of our kernel."""
        self._launch(x, rows, y, self._shares)

    def _launch(self, x: np.ndarray, rows: int, y: np.ndarray, shares: np.ndarray) -> None:
        strip = WIDE_STRIP if rows <= ROW_MULTIPLE else STRIP
        group_product(x[:rows], self._flat, self._table, shares, y[:rows], strip)

    def run_wide(self, x: np.ndarray, rows: int, y: np.ndarray) -> None:
        """Product by product through torch, in blocks of rows and columns; those the probe did not prove, through ours."""
        if self._unproved_shares is not None:
            self._launch(x, rows, y, self._unproved_shares)
        x_rows, y_rows = torch.from_numpy(x), torch.from_numpy(y)
        for index in self._proved:
            p = self.products[index]
            weight, y_column = self.weight(index), int(self._table[index, 4])
            for left in range(0, p.columns, WIDE_COLUMNS):
                right = min(left + WIDE_COLUMNS, p.columns)
                part = weight[:, left:right].float()  # float32 weights: the same memory
                for first in range(0, padded(rows), WIDE_ROWS):
                    last = min(first + WIDE_ROWS, padded(rows))
                    torch.mm(
                        x_rows[first:last, p.x_column : p.x_column + p.depth],
                        part,
                        out=y_rows[first:last, y_column + left : y_column + right],
                    )
            if p.activation != "none":
                activate_columns(y, rows, y_column, y_column + p.columns, ACTIVATIONS.index(p.activation))

    def describe(self) -> list[dict[str, Any]]:
        """One row a product: its shape and what was picked for it."""
        rows = []
        for p, pick in zip(self.products, self._picks, strict=True):
            wide_from = self.wide_from if pick.wide_from else 0
            rows.append({"depth": p.depth, "columns": p.columns, "k_block": pick.k_block, "wide_from": wide_from})
        return rows


def _share_out(products: Sequence[Product], chosen: Iterable[int], threads: int) -> np.ndarray:
    """int64 rows (thread, product, first column, last column): each thread reads about as many bytes."""
    units = [(i, products[i].depth) for i in chosen for _ in range(-(-products[i].columns // _SHARE_COLUMNS))]
    total = sum(depth for _, depth in units)
    shares: list[list[int]] = []
    done, column = 0, [0] * len(products)
    for index, depth in units:
        # a unit belongs to the thread in whose part of the bytes its middle lies
        thread = min((2 * done + depth) * threads // (2 * total), threads - 1)
        first, last = column[index], min(column[index] + _SHARE_COLUMNS, products[index].columns)
        if shares and shares[-1][0] == thread and shares[-1][1] == index:
            shares[-1][3] = last
        else:
            shares.append([thread, index, first, last])
        column[index], done = last, done + depth
    return np.asarray(shares, dtype=np.int64)
