"""The only door to products with weights on CUDA. Same K order for every row count, so same bits (docs/exactness.md).

Products that run at the same time stand in one :class:`CudaGroup`: one launch of the in-order kernel for few rows, the
library without split-K for many. Which of the two serves a row count, and how the kernel is tiled, is fixed at load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from kittiwake.errors import DeviceError
from kittiwake.ops.matmul import triton as tiles
from kittiwake.ops.matmul.cuda import ACTIVATIONS, ROW_CLASSES, Narrow, activate, narrow_product
from kittiwake.ops.matmul.float32 import Plain, float32_product
from kittiwake.ops.matmul.triton import TILE, Config, rows_kernel
from kittiwake.ops.triton_launch import launch_options

DEPTH_PADDING = 16
"""Rows of weights begin at multiples of so many elements."""
ROW_PADDING = 16
"""Rows of inputs and of grouped outputs begin at multiples of so many elements.

Of 16 bytes or more, as kernels load them; and Triton makes one kernel for strides that are multiples of 16 and a slower
one for the rest, so that a trial at load runs what is served.
"""
CANNOT_RUN = (RuntimeError, DeviceError, OutOfResources, PTXASError)
"""What a launch raises that asks for more than this card has, of shared memory say; running out of memory is no such thing."""


LIBRARY_ROWS = (
    *(12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072),
    *(4096, 5120, 6144, 8192),
)
"""Row counts at which the library may serve: which of its kernels runs follows from the count, so each is proved by itself.

Launches are padded to these; any other count goes to the in-order kernel.
"""
LibraryRows = Mapping[int, frozenset[int]]
"""Row count → the products of a group, by their places, for which the library has the bits of the in-order kernel."""


def padded_row(columns: int) -> int:
    """Elements from the beginning of a row of so many to that of the next."""
    return -(-columns // ROW_PADDING) * ROW_PADDING


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of one type hold the same bits: a zero has a sign, and what is not a number is like its like."""
    kind = torch.int32 if found.dtype.itemsize == 4 else torch.int16
    return bool(torch.equal(found.view(kind), expected.view(kind)))


@dataclass(frozen=True)
class CudaProduct:
    """One product of a group: ``columns`` outputs, sums over ``depth``."""

    name: str
    depth: int
    columns: int
    input: int = 0
    """Which input of the group it reads, by number,"""
    input_column: int = 0
    """and from which column."""
    activation: str = "none"


ROW_LIMITS = (1, 8, 16, 32, 64, 128, 256, 512, 1 << 30)
"""A pick serves the row counts up to its limit."""


@dataclass(frozen=True)
class Choice:
    """What can run a group: the narrow kernel, float32's own, the in-order kernel in tiles, or the library."""

    kind: str
    """One of narrow, plain, tile and library."""
    layout: Narrow | Plain | Config | None = None

    def __str__(self) -> str:
        """In a few characters."""
        return " ".join([self.kind, *("x".join(map(str, astuple(part))) for part in [self.layout] if part is not None)])


@dataclass(frozen=True)
class Picks:
    """What serves which row count for one shape of group; one choice for each of ROW_LIMITS."""

    choices: tuple[Choice, ...]
    reason: str = "default"
    replaced: tuple[str, ...] = ()
    """What was to serve and gave other bits, or cannot run on this card."""
    library_rows: LibraryRows = field(default_factory=dict)
    """What of a group the library serves where it is chosen; the in-order kernel serves the rest."""

    def choice(self, rows: int) -> Choice:
        """What runs so many rows."""
        return next(choice for most, choice in zip(ROW_LIMITS, self.choices, strict=True) if rows <= most)


def default_picks(depth: int, element: torch.dtype, is_grouped: bool) -> Picks:
    """The in-order kernel for every row count: exact on every card from compute capability 8.0 on."""
    return Picks(tuple(Choice("tile", default_tile(depth, element, most, is_grouped)) for most in ROW_LIMITS))


def default_tile(depth: int, element: torch.dtype, rows: int, is_grouped: bool) -> Config:
    """A tiling that fits every card."""
    bk = min(64, max(16, triton.next_power_of_2(depth)))
    if element == torch.float32:
        return Config(16 if rows <= 16 else 32, 32, min(bk, 32), 4, 3)
    if rows <= 16:
        return Config(16, 32, bk, 2, 4)
    return Config(32, 32, bk, 4, 4) if rows <= 32 else Config(64, 32 if is_grouped else 64, bk, 4, 3)


def padded_depth(depth: int) -> int:
    """Elements from one row of weights to the next."""
    return -(-depth // DEPTH_PADDING) * DEPTH_PADDING


class CudaGroup:
    """Products that are launched together; weights of all in one flat tensor, each [columns, depth] with padding."""

    def __init__(
        self, products: Sequence[CudaProduct], dtype: torch.dtype, device: torch.device, *, behind: str = ""
    ) -> None:
        """``behind``: the op in front of the products, where what runs them fastest is not what does behind another."""
        self.products = tuple(products)
        self._behind = behind
        self.dtype = dtype
        align = TILE if len(products) > 1 else 2 * TILE
        self.align = align
        self._places: dict[str, tuple[int, int, CudaProduct]] = {}
        lines: list[tuple[int, ...]] = []
        codes: list[int] = []
        first, column = 0, 0
        for product in products:
            stride = padded_depth(product.depth)
            padded = self.padded_columns(product)
            self._places[product.name] = (first, column, product)
            for begin in range(0, padded, TILE):
                left = product.columns - begin
                lines.append(
                    (
                        product.input,
                        product.input_column,
                        first + begin * stride,
                        product.depth,
                        column + begin,
                        max(left, 0),
                    )
                )
                codes.append(ACTIVATIONS[product.activation])
            first += padded * stride
            column += product.columns
        self.columns = column
        self.depth = max(product.depth for product in products)
        self._aligned = 16 if all(p.input_column % 16 == 0 for p in products) else 1
        self.weight = torch.zeros(first, dtype=dtype, device=device)
        self.lines = torch.tensor(lines, dtype=torch.int64, device=device)
        self._codes = torch.tensor(codes, dtype=torch.int32, device=device)
        self._has_rows_of_16_bytes = dtype.itemsize == 2 and all(
            p.input_column % 8 == 0 and p.depth % 8 == 0 for p in products
        )
        self._has_pieces_of_4 = all(p.input_column % 4 == 0 and p.depth % 4 == 0 for p in products)
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.picks = default_picks(self.depth, dtype, len(products) > 1)

    def padded_columns(self, product: CudaProduct) -> int:
        """Columns that the weights of a product have room for."""
        return -(-product.columns // self.align) * self.align

    @property
    def shape(self) -> str:
        """Columns, depth and, where there are several, how many products: what a pick depends on first of all."""
        return f"{self.columns}x{self.depth}" + (f"/{len(self.products)}" if len(self.products) > 1 else "")

    @property
    def key(self) -> str:
        """All that a pick depends on."""
        return f"{self.shape} behind {self._behind}" if self._behind else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes

    def matrix(self, name: str) -> torch.Tensor:
        """The weights of one product, a view [columns, depth]."""
        first, _, product = self._places[name]
        stride = padded_depth(product.depth)
        return self.weight.as_strided((product.columns, product.depth), (stride, 1), first)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take the weights [columns, depth] of one product."""
        self.matrix(name).copy_(tensor)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, *, overlap: bool) -> None:
        """x [inputs, M, *] or [M, *] → out [M, columns]; ``overlap`` as in :class:`kittiwake.ops.nvrtc.CudaKernel`.

        The library's flags must be those of :func:`exact_products`.
        """
        rows = out.shape[0]
        choice = self.picks.choice(rows)
        if choice.kind == "library":
            self._by_library(x, out, self.picks.library_rows.get(rows, frozenset()), overlap)
        else:
            self.run(choice, x, out, overlap=overlap)

    def _by_library(self, x: torch.Tensor, out: torch.Tensor, served: frozenset[int], overlap: bool) -> None:
        """Some of the products by the library, the others by the in-order kernel."""
        law = self.in_order(out.shape[0])
        if not served:
            self.run(law, x, out, overlap=overlap)
            return
        assert isinstance(law.layout, Config)
        for place in range(len(self.products)):
            if place in served:
                self.library(x, out, (place,))
            else:
                self.tiled(x, out, law.layout, overlap=overlap, product=place)

    def in_order(self, rows: int) -> Choice:
        """The in-order kernel, which defines the bits of this group and fits every card, for so many rows."""
        return Choice("tile", default_tile(self.depth, self.dtype, rows, len(self.products) > 1))

    def can_run(self, choice: Choice, out_dtype: torch.dtype) -> bool:
        """Whether a choice fits this group."""
        if choice.kind == "narrow":
            assert isinstance(choice.layout, Narrow)
            return self._has_rows_of_16_bytes and choice.layout.bn <= self.align
        if choice.kind == "plain":
            assert isinstance(choice.layout, Plain)
            is_cut_evenly = all(self.padded_columns(product) % choice.layout.bn == 0 for product in self.products)
            return self.dtype == torch.float32 and self._has_pieces_of_4 and is_cut_evenly
        if choice.kind == "library":  # nothing keeps it from splitting a float32 sum
            return out_dtype == self.dtype != torch.float32
        assert isinstance(choice.layout, Config)
        return choice.layout.bn <= self.align

    def kernel_of(self, choice: Choice, x: torch.Tensor, out: torch.Tensor) -> tuple[object, ...]:
        """What a launch by a choice is compiled for, the choice itself left out: launches alike in it share a kernel."""
        if choice.kind != "tile":
            size = next((most for most in ROW_CLASSES if out.shape[0] <= most), ROW_CLASSES[-1])
            return (self.dtype, out.dtype, size)
        assert isinstance(choice.layout, Config)
        strides = (x.stride(-2), x.stride(0) if x.dim() == 3 else 0, out.stride(0))
        return (
            *(self.dtype, out.dtype, min(choice.layout.bn, self.align), self._aligned, self._is_even(choice.layout)),
            *((stride == 1, stride % 16 == 0) for stride in strides),
        )

    def _is_even(self, config: Config) -> bool:
        return all(product.depth % config.bk == 0 for product in self.products)

    def run(self, choice: Choice, x: torch.Tensor, out: torch.Tensor, *, overlap: bool) -> None:
        """The same by a choice."""
        if choice.kind == "narrow":
            assert isinstance(choice.layout, Narrow)
            narrow_product(x, self.weight, out, self.lines, self._codes, choice.layout, overlap=overlap)
        elif choice.kind == "plain":
            assert isinstance(choice.layout, Plain)
            float32_product(x, self.weight, out, self.lines, self._codes, choice.layout, overlap=overlap)
        elif choice.kind == "library":
            self.library(x, out)
        else:
            assert isinstance(choice.layout, Config)
            self.tiled(x, out, choice.layout, overlap=overlap)

    def library(self, x: torch.Tensor, out: torch.Tensor, places: Iterable[int] | None = None) -> None:
        """By cuBLASLt, product by product; all of them, or those at some places."""
        for place in range(len(self.products)) if places is None else places:
            product = self.products[place]
            _, column, _ = self._places[product.name]
            given = x[product.input] if x.dim() == 3 else x
            given = given[:, product.input_column : product.input_column + product.depth]
            torch.mm(given, self.matrix(product.name).t(), out=out[:, column : column + product.columns])
            if product.activation != "none":
                activate(out, column, product.columns, product.activation)

    def tiled(
        self, x: torch.Tensor, out: torch.Tensor, config: Config, *, overlap: bool, product: int | None = None
    ) -> None:
        """By the in-order kernel, all products or the one at a place."""
        rows = out.shape[0]
        bn = min(config.bn, self.align)
        lines, codes = (self.lines, self._codes) if product is None else self._table_of(product)
        grid = (lines.shape[0] * TILE // bn, -(-rows // config.bm))
        rows_kernel[grid](
            x,
            self.weight,
            out,
            lines,
            codes,
            rows,
            x.stride(-2),
            x.stride(0) if x.dim() == 3 else 0,
            out.stride(0),
            BM=config.bm,
            BN=bn,
            BK=config.bk,
            EVEN=self._is_even(config),
            ALIGN=self._aligned,
            PADDED=DEPTH_PADDING,
            PRECISION="ieee",
            EARLY=tiles.BEGIN_NEXT if overlap else 0,
            num_warps=config.warps,
            num_stages=config.stages,
            **launch_options(overlap),
        )

    def _table_of(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The lines and activations of one product, where kernels may read them as they read those of all."""
        if place not in self._tables:
            counts = [self.padded_columns(product) // TILE for product in self.products]
            some = slice(sum(counts[:place]), sum(counts[: place + 1]))
            self._tables[place] = (self.lines[some].clone(), self._codes[some].clone())
        return self._tables[place]

    def columns_of(self, place: int) -> slice:
        """Where the outputs of a product stand."""
        _, column, product = self._places[self.products[place].name]
        return slice(column, column + product.columns)

    def describe(self) -> dict[str, Any]:
        """The pick of this shape, as JSON values."""
        served = {str(most): str(choice) for most, choice in zip(ROW_LIMITS, self.picks.choices, strict=True)}
        served["more"] = served.pop(str(ROW_LIMITS[-1]))
        document = {"shape": self.key, "up_to_rows": served, "reason": self.picks.reason}
        return document | {"replaced": list(self.picks.replaced)}


@contextmanager
def exact_products(place: torch.device | None = None) -> Iterator[None]:
    """The library's flags under which its rows keep their bits: cuBLASLt, no split-K; as they were afterwards.

    TF32 is no matter: no product in float32 is the library's. ``place``: where launches go; the CPU has no such flags.
    """
    if place is not None and place.type != "cuda":
        yield
        return
    flags = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    before = {"allow_fp16_accumulation": flags.allow_fp16_accumulation}
    reductions = {}
    for kind in ("fp16", "bf16"):
        name = f"allow_{kind}_reduced_precision_reduction"
        reductions[name] = (getattr(flags, name), getattr(flags, f"{name}_split_k"))
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        for name in reductions:
            setattr(flags, name, (False, False))
        for name in before:
            setattr(flags, name, False)
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        for name, value in (before | reductions).items():
            setattr(flags, name, value)
