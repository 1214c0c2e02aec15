"""The only door to products with weights.

A :class:`LinearGroup` holds products that read the same buffer. Narrow batches go through our K-in-order kernel, wide
ones through torch's matrix product, padded to a multiple of four rows; the load-time probe (``layers/probe.py``) takes
torch only where it has the very same bits. See docs/exactness.md.
"""

from __future__ import annotations

import mmap
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
HUGE_PAGE_BYTES = 2 << 20
_SHARE_COLUMNS = 16
_TILE_COLUMNS = 32
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDENED = "widened"
"""The name in a workspace under which weights of a tile are widened."""


def padded(rows: int) -> int:
    """The next multiple of four: how many rows every buffer has."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def huge_empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised vector on huge pages, where the system grants them: strided reads then miss fewer page entries."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    size = max(1, -(-count * dtype.itemsize // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages: the same memory on small ones
    return torch.frombuffer(memory, dtype=dtype, count=count)


@contextmanager
def threads_in_force(threads: int) -> Iterator[None]:
    """Run the body with this many threads in torch and Numba, then put both back."""
    start_threads()
    torch_before, numba_before = torch.get_num_threads(), numba.get_num_threads()
    try:
        if torch_before != threads:
            torch.set_num_threads(threads)
        if numba_before != threads:
            numba.set_num_threads(threads)
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


def float32_words(count: int, dtype: str) -> int:
    """How many float32 values take as many bytes as ``count`` values of this type."""
    return count * np.dtype(dtype).itemsize // np.dtype(np.float32).itemsize


class Workspace:
    """Named float32 buffers that grow to the largest batch seen and are used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}
        self._views: dict[str, tuple[int, int, np.ndarray]] = {}
        self.lock = threading.Lock()
        """Held by a forward: buffers of one model serve one batch at a time."""

    def get(self, name: str, rows: int, columns: int) -> np.ndarray:
        """Float32 [padded(rows), columns]; rows beyond ``rows`` are zero, the others hold what they held.

        Whoever writes the rows beyond ``rows`` writes zeros, so that a view may be handed out again as it is.
        """
        last = self._views.get(name)
        if last is not None and last[0] == rows and last[1] == columns:
            return last[2]
        size = padded(rows) * columns
        self.reserve(name, size)
        view = self._buffers[name][:size].reshape(padded(rows), columns)
        view[rows:] = 0
        self._views[name] = (rows, columns, view)
        return view

    def reserve(self, name: str, count: int) -> None:
        """Have room for ``count`` float32 values under this name; what it held is lost when it grows. Raises MemoryError."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < count:
            buffer = None
            self._buffers.pop(name, None)  # the old memory goes before the new comes
            self._views.pop(name, None)
            self._buffers[name] = np.empty(count, dtype=np.float32)

    def vector(self, name: str, count: int, dtype: str = "float32") -> np.ndarray:
        """A vector of ``count`` values of a type of 4 or 8 bytes, with what was in it; not for names given to :meth:`get`."""
        words = float32_words(count, dtype)
        self.reserve(name, words)
        return self._buffers[name][:words].view(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


@dataclass(frozen=True)
class Tile:
    """Some columns of a product, kept as one piece [K, columns] so that a thread reads its weights front to back."""

    product: Product
    pick: Pick
    first: int
    last: int
    y_column: int
    """Where column ``first`` goes in the output."""
    offset: int
    """Where the piece begins in the group's weights."""

    @property
    def columns(self) -> int:
        """Columns of the piece."""
        return self.last - self.first


class LinearGroup:
    """Products that share an input buffer and write one output buffer, side by side in the order given."""

    def __init__(
        self, products: Sequence[Product], picks: dict[tuple[int, int], Pick], dtype: str, threads: int
    ) -> None:
        self.products = tuple(products)
        self.columns = sum(p.columns for p in products)
        """Columns of the output."""
        self._tiles = _cut(products, picks, threads)
        # one switch for the whole group, set by its largest weight
        self.wide_from = picks[max((p.depth * p.columns, p.depth, p.columns) for p in products)[1:]].wide_from
        self._proved = [tile for tile in self._tiles if tile.pick.wide_from]
        unproved = [index for index, tile in enumerate(self._tiles) if not tile.pick.wide_from]
        self._weights = huge_empty(sum(p.depth * p.columns for p in products), STORED[dtype])
        self._flat = (self._weights.view(torch.uint16) if dtype == "bf16" else self._weights).numpy()
        self._table = _table(self._tiles)
        self._shares = _share_out(self._tiles, range(len(self._tiles)), threads)
        self._unproved_shares = _share_out(self._tiles, unproved, threads) if unproved else None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: what one pass over the group reads."""
        return self._weights.numel() * self._weights.element_size()

    def piece(self, tile: Tile) -> torch.Tensor:
        """The weights of a tile as kept, [K, columns], a view."""
        size = tile.product.depth * tile.columns
        return self._weights[tile.offset : tile.offset + size].view(tile.product.depth, tile.columns)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a weight [N, K] into its place, transposed and rounded to the group's dtype."""
        tiles = [tile for tile in self._tiles if tile.product.name == name]
        if not tiles:
            raise ModelError(f"{name} is not a weight of this group: {[p.name for p in self.products]}")
        expected = (tiles[0].product.columns, tiles[0].product.depth)
        if tuple(tensor.shape) != expected:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
        for tile in tiles:
            self.piece(tile).copy_(tensor[tile.first : tile.last].t())

    def __call__(self, x: np.ndarray, rows: int, y: np.ndarray, workspace: Workspace | None = None) -> np.ndarray:
        """x float32 [padded(rows), X] → y [padded(rows), columns] (written and returned), activations applied.

        Weights that torch has to be given widened are widened in ``workspace``; left out: in memory of their own.
        """
        if self.wide_from and rows >= self.wide_from:
            self.run_wide(x, rows, y, workspace)
        else:
            self.run_narrow(x, rows, y)
        return y

    def run_narrow(self, x: np.ndarray, rows: int, y: np.ndarray) -> None:
        """All products in one launch of our kernel."""
        self._launch(x, rows, y, self._shares)

    def _launch(self, x: np.ndarray, rows: int, y: np.ndarray, shares: np.ndarray) -> None:
        strip = WIDE_STRIP if rows <= ROW_MULTIPLE else STRIP
        group_product(x, rows, self._flat, self._table, shares, y, strip)

    def run_wide(self, x: np.ndarray, rows: int, y: np.ndarray, workspace: Workspace | None = None) -> None:
        """Product by product through torch, in blocks of rows and columns; those the probe did not prove, through ours."""
        if self._unproved_shares is not None:
            self._launch(x, rows, y, self._unproved_shares)
        x_rows, y_rows = torch.from_numpy(x), torch.from_numpy(y)
        for tile in self._proved:
            p, columns = tile.product, slice(tile.y_column, tile.y_column + tile.columns)
            piece = self._widened(tile, workspace)
            for first in range(0, padded(rows), WIDE_ROWS):
                block = slice(first, min(first + WIDE_ROWS, padded(rows)))
                torch.mm(x_rows[block, p.x_column : p.x_column + p.depth], piece, out=y_rows[block, columns])
            if p.activation != "none":
                activate_columns(y, rows, columns.start, columns.stop, ACTIVATIONS.index(p.activation))

    def _widened(self, tile: Tile, workspace: Workspace | None) -> torch.Tensor:
        """The weights of a tile in float32: of float32 weights the same memory."""
        piece = self.piece(tile)
        if workspace is None or piece.dtype == torch.float32:
            return piece.float()
        room = torch.from_numpy(workspace.vector(WIDENED, piece.numel()))
        return room.view(piece.shape).copy_(piece)

    def describe(self) -> list[dict[str, Any]]:
        """One row a product: its shape and what was picked for it."""
        return [
            {
                "depth": tile.product.depth,
                "columns": tile.product.columns,
                "k_block": tile.pick.k_block,
                "wide_from": self.wide_from if tile.pick.wide_from else 0,
            }
            for tile in self._tiles
            if tile.first == 0
        ]


def tile_values(depth: int, columns: int, threads: int) -> int:
    """Values of the largest tile of a product."""
    return depth * min(columns, _tile_width(columns, threads))


def _tile_width(columns: int, threads: int) -> int:
    """Columns of the tiles of a product: about one tile a thread, none too wide for a strip of the kernel."""
    count = threads * -(-columns // (threads * WIDE_STRIP)) if columns >= threads * STRIP // 2 else 1
    return -(-columns // (count * _SHARE_COLUMNS)) * _SHARE_COLUMNS


def _cut(products: Sequence[Product], picks: dict[tuple[int, int], Pick], threads: int) -> list[Tile]:
    """Every product in tiles."""
    tiles, offset, y_column = [], 0, 0
    for p in products:
        width = _tile_width(p.columns, threads)
        for first in range(0, p.columns, width):
            last = min(first + width, p.columns)
            tiles.append(Tile(p, picks[p.depth, p.columns], first, last, y_column + first, offset))
            offset += p.depth * (last - first)
        y_column += p.columns
    return tiles


def _table(tiles: Sequence[Tile]) -> np.ndarray:
    """The kernel's table: to it, a tile is a product of its own."""
    rows = [
        (
            tile.product.x_column,
            tile.product.depth,
            tile.columns,
            tile.offset,
            tile.y_column,
            tile.pick.k_block,
            ACTIVATIONS.index(tile.product.activation),
        )
        for tile in tiles
    ]
    return np.asarray(rows, dtype=np.int64)


def _share_out(tiles: Sequence[Tile], chosen: Iterable[int], threads: int) -> np.ndarray:
    """int64 rows (thread, tile, first column, last column): each thread has about as much to do.

    Beside reading its columns, a tile costs about as much as _TILE_COLUMNS of them: every row of it is begun anew.
    """
    units = [
        (index, first, min(first + _SHARE_COLUMNS, tiles[index].columns))
        for index in chosen
        for first in range(0, tiles[index].columns, _SHARE_COLUMNS)
    ]
    sizes = [
        tiles[index].product.depth * (last - first + (0 if first else _TILE_COLUMNS)) for index, first, last in units
    ]
    total, done = sum(sizes), 0
    shares: list[list[int]] = []
    for (index, first, last), size in zip(units, sizes, strict=True):
        # a unit belongs to the thread in whose part of the work its middle lies
        thread = min((2 * done + size) * threads // (2 * total), threads - 1)
        if shares and shares[-1][:2] == [thread, index]:
            shares[-1][3] = last
        else:
            shares.append([thread, index, first, last])
        done += size
    return np.asarray(shares, dtype=np.int64)
