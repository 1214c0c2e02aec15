"""Which implementation of a product serves which row count on this card: tuned once, proved at every load.

A pick is used only where its rows have the bits of the in-order kernel on data that tell sums apart, at row counts on
both sides of every border; the library at every single count that it serves. What is shipped for a card, or was found by
an earlier load, is proved again; what fails is replaced.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import triton

from kittiwake.device import cache_dir, captured, usable_cores
from kittiwake.layers.cuda_linear import (
    CANNOT_RUN,
    LIBRARY_ROWS,
    ROW_LIMITS,
    Choice,
    CudaGroup,
    Picks,
    exact_products,
    padded_row,
    same_bits,
)
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.matmul.float32 import Plain
from kittiwake.ops.matmul.triton import Config
from kittiwake.ops.nvrtc import can_overlap
from kittiwake.progress import Progress

_PROVED_AT = {
    1: (1,),
    8: (2, 7, 8),
    16: (9, 16),
    32: (17, 31),
    64: (33, 63, 64),
    128: (65, 127),
    256: (129, 256),
    512: (257,),
}
_PROVED_ABOVE = (513, 1000)
_MOST_ROWS = 1000
_TIMED_ROWS = {1 << 30: 1024}
_NARROW = {
    1: ((16, 8, 256, 3), (32, 8, 256, 4), (8, 8, 256, 4), (8, 8, 256, 6), (16, 8, 128, 6), (64, 16, 128, 4), (32, 8, 128, 3)),
    8: ((32, 8, 256, 4), (16, 8, 256, 3), (16, 8, 512, 3), (32, 8, 128, 3)),
}  # fmt: skip
_FEW_COLUMNS = 256
"""Columns up to which a product has so few blocks that each may hold most of its weights before it waits."""
_FEW = {
    1: (Narrow(8, 8, 256, 9, rows=1), Narrow(16, 8, 512, 5, rows=1)),
    32: (
        Narrow(8, 8, 256, 9, rows=8),
        Narrow(16, 8, 512, 5, rows=8),
        Narrow(8, 8, 256, 5, rows=16),
        Narrow(16, 8, 256, 6, rows=16),
    ),
    64: (Narrow(8, 8, 256, 5, rows=16), Narrow(16, 8, 256, 6, rows=16)),
}
_TILES = {
    16: ((16, 16, 256, 2, 4), (16, 32, 128, 2, 6), (16, 32, 128, 4, 4), (16, 16, 32, 1, 6), (16, 16, 128, 2, 6)),
    32: ((32, 16, 256, 2, 4), (32, 32, 128, 2, 6), (32, 32, 128, 4, 4), (32, 64, 128, 4, 4),
         (32, 32, 32, 1, 6), (32, 64, 64, 4, 5)),
    64: ((64, 32, 128, 4, 4), (64, 64, 64, 4, 5), (64, 64, 128, 4, 4), (64, 16, 32, 1, 6), (64, 32, 64, 4, 4)),
    128: ((64, 32, 128, 4, 4), (64, 64, 64, 4, 5), (128, 64, 64, 4, 4), (128, 32, 64, 4, 4), (64, 32, 32, 2, 4)),
}  # fmt: skip
_PLAIN = {
    8: ((8, 8, 2, 1, 128, 4), (8, 8, 2, 1, 256, 3), (8, 16, 2, 1, 128, 3), (8, 32, 2, 1, 64, 4)),
    16: ((16, 8, 2, 1, 128, 3), (16, 16, 2, 1, 64, 4), (16, 32, 2, 2, 64, 3)),
    64: ((16, 16, 2, 2, 64, 3), (16, 24, 2, 3, 64, 3), (16, 32, 2, 2, 64, 3), (32, 24, 2, 3, 64, 3), (32, 32, 4, 2, 64, 3),
         (64, 24, 4, 3, 64, 3), (32, 48, 4, 3, 64, 3), (64, 32, 4, 4, 64, 3)),
    128: ((32, 24, 2, 3, 64, 3), (16, 48, 4, 2, 64, 3), (32, 32, 4, 2, 64, 3), (32, 32, 4, 4, 64, 3), (64, 48, 4, 6, 32, 4),
          (64, 32, 4, 4, 32, 4), (64, 32, 8, 4, 32, 4), (128, 32, 8, 4, 32, 3)),
    256: ((32, 48, 4, 3, 64, 3), (64, 24, 4, 3, 64, 3), (32, 32, 4, 4, 64, 3), (64, 48, 4, 6, 32, 4), (64, 32, 4, 4, 32, 4),
          (64, 32, 8, 4, 32, 4), (128, 32, 8, 4, 32, 3)),
    512: ((32, 32, 4, 4, 64, 3), (64, 48, 4, 6, 32, 4), (64, 32, 8, 4, 32, 4), (128, 32, 8, 4, 32, 3), (64, 64, 8, 4, 32, 4),
          (128, 64, 8, 8, 32, 3)),
}  # fmt: skip


def pick_products(
    groups: Sequence[CudaGroup],
    out_dtypes: Mapping[str, torch.dtype],
    progress: Progress | None = None,
    *,
    most_rows: int = _MOST_ROWS,
) -> None:
    """Set the picks of every group; ``out_dtypes`` names those whose outputs have another type than their weights.

    ``most_rows``: the most that a launch of the others has.
    """
    by_key: dict[str, list[CudaGroup]] = {}
    for group in groups:
        by_key.setdefault(group.key, []).append(group)
    element = groups[0].dtype
    known = _shipped(element) | _found(element)
    news: dict[str, tuple[Choice, ...]] = {}
    planned: list[tuple[list[CudaGroup], Picks, torch.dtype]] = []
    tell: Progress = progress if progress is not None else lambda what, done, total: None
    with exact_products():
        for done, (key, same) in enumerate(by_key.items()):
            out_dtype = out_dtypes.get(key, element)
            choices = known_choices(same[0], known)
            if choices is not None:
                picks = Picks(choices, "measured on this kind of card")
            else:
                tell("measuring products", done, len(by_key))
                picks = _tune(same, out_dtype)
                news[key] = picks.choices
            planned.append((same, picks, out_dtype))
        _compile(_first_launches((same[0], picks, out_dtype) for same, picks, out_dtype in planned))
        for done, (same, picks, out_dtype) in enumerate(planned):
            picks = _proved(same[0], picks, out_dtype, _MOST_ROWS if same[0].key in out_dtypes else most_rows)
            for group in same:
                group.picks = picks
            tell("proving products", done + 1, len(planned))
    if news:
        _keep(element, news)


# -- proof


def _proved(group: CudaGroup, picks: Picks, out_dtype: torch.dtype, most_rows: int = _MOST_ROWS) -> Picks:
    """The picks, with every choice that gives other bits than the in-order kernel replaced by it.

    The library keeps the products and row counts at which its bits are those; a launch has at most ``most_rows``.
    """
    with _telling_weights(group):
        given, expected = _trial(group, out_dtype, max(most_rows, _MOST_ROWS))
        _make_telling(group, given)
        group.run(group.in_order(_MOST_ROWS), given, expected, overlap=can_overlap(group.weight.device))
        choices: list[Choice] = []
        replaced: list[str] = []
        library_rows: dict[int, frozenset[int]] = {}
        least = 1
        for most, choice in zip(ROW_LIMITS, picks.choices, strict=True):
            where = f"up to {most} rows" if most < ROW_LIMITS[-1] else "for more rows"
            if choice.kind == "library":
                counts = [rows for rows in LIBRARY_ROWS if least <= rows <= min(most, most_rows)]
            else:
                counts = list(_PROVED_AT.get(most, _PROVED_ABOVE))
            served: dict[int, frozenset[int]] = {}
            if group.can_run(choice, out_dtype):
                served = {rows: _agreeing(group, choice, given, expected, rows) for rows in counts}
            missing = sum(len(group.products) - len(places) for places in served.values())
            if choice.kind == "library" and any(served.values()):
                library_rows |= {rows: places for rows, places in served.items() if places}
                replaced += [f"{choice} {where}: {missing} products of {len(counts)} row counts"] if missing else []
            elif missing or not served:
                replaced.append(f"{choice} {where}")
                choice = group.in_order(most)
            choices.append(choice)
            least = most + 1
    return Picks(tuple(choices), f"{picks.reason}; bits proved", tuple(replaced), library_rows)


def keeps_bits_inside(
    group: CudaGroup, most_rows: int, run: Callable[[torch.Tensor, torch.Tensor | None], Sequence[torch.Tensor]]
) -> bool:
    """Whether a kernel that makes the products of a group itself has the bits of the in-order kernel in front of another.

    ``run(x, None)`` is to run the first on x [M, *], ``run(x, made)`` the second on the products made, both from the same
    states; it gives all that they write. Tried for 1 to ``most_rows`` rows, on sums that tell their order.
    """
    with _telling_weights(group):
        for rows in range(1, most_rows + 1):
            x, made = _trial(group, group.dtype, rows)
            _make_telling(group, x)
            group.run(group.in_order(rows), x, made, overlap=can_overlap(group.weight.device))
            try:
                if not all(map(same_bits, run(x, None), run(x, made))):
                    return False
            except CANNOT_RUN:
                return False
    return True


_TELLING = 4096.0


@contextmanager
def _telling_weights(group: CudaGroup) -> Iterator[None]:
    """Weights of random numbers that stand twice in every row, in place of a group's own. With inputs of
    :func:`_make_telling` sums cancel, so that nothing but their rounding is left, which tells in what order they were made:
    in sums of another kind it is rounded away in all but one of a thousand outputs."""
    own = group.weight
    generator = torch.Generator(own.device).manual_seed(7)
    group.weight = torch.zeros_like(own)
    try:
        for product in group.products:
            matrix, half = group.matrix(product.name), product.depth // 2
            matrix[:, : product.depth - half].normal_(generator=generator)
            matrix[:, product.depth - half :] = matrix[:, :half]
        yield
    finally:
        group.weight = own


def _make_telling(group: CudaGroup, given: torch.Tensor) -> None:
    """Every other row is large, and its second half undoes the first."""
    for product in group.products:
        rows = (given[product.input] if given.dim() == 3 else given)[::2]
        first, half = product.input_column, product.depth // 2
        end = first + product.depth
        rows[:, first : end - half].normal_(generator=torch.Generator(given.device).manual_seed(first + 1)).mul_(
            _TELLING
        )
        rows[:, end - half : end] = -rows[:, first : first + half]


def _trial(group: CudaGroup, out_dtype: torch.dtype, rows: int = _MOST_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows for a group, and room for its outputs, filled with NaN."""
    inputs = 1 + max(product.input for product in group.products)
    columns = max(product.input_column + product.depth for product in group.products)
    generator = torch.Generator(group.weight.device).manual_seed(rows)
    kind: dict[str, Any] = {"dtype": group.dtype, "device": group.weight.device}
    given = torch.randn((inputs, rows, padded_row(columns)), generator=generator, **kind)
    # rows as they are served: how they are aligned can decide what the library runs
    out = torch.full((rows, padded_row(group.columns)), torch.nan, **kind | {"dtype": out_dtype})[:, : group.columns]
    return given if inputs > 1 else given[0], out


def _agrees(group: CudaGroup, choice: Choice, given: torch.Tensor, expected: torch.Tensor, rows: int) -> bool:
    """Whether all products have these bits by a choice."""
    return len(_agreeing(group, choice, given, expected, rows)) == len(group.products)


def _agreeing(
    group: CudaGroup, choice: Choice, given: torch.Tensor, expected: torch.Tensor, rows: int
) -> frozenset[int]:
    """The places of the products that have these bits by a choice, launched as a model does: no kernel is compiled for the
    proof alone."""
    out = torch.empty_strided((rows, group.columns), expected.stride(), dtype=expected.dtype, device=expected.device)
    out.fill_(torch.nan)
    try:
        group.run(choice, given[..., :rows, :], out, overlap=can_overlap(group.weight.device))
        columns = [group.columns_of(place) for place in range(len(group.products))]
        return frozenset(place for place, some in enumerate(columns) if same_bits(out[:, some], expected[:rows, some]))
    except torch.OutOfMemoryError:
        raise
    except CANNOT_RUN:
        return frozenset()


# -- tuning


def _tune(same: Sequence[CudaGroup], out_dtype: torch.dtype) -> Picks:
    """The fastest choice for every row limit, timed over the groups of this shape, one after another."""
    group, some = same[0], same[: min(len(same), 8)]
    choices = []
    for most in ROW_LIMITS:
        rows = _TIMED_ROWS.get(most, most)
        given, out = _trial(group, out_dtype, rows)
        timed = []
        candidates = list(_candidates(group, most, out_dtype))
        _compile(partial(_run_once, group, choice, given, out) for choice in candidates)
        for choice in candidates:
            try:
                timed.append((_time_us(some, choice, given, out), str(choice), choice))
            except torch.OutOfMemoryError:
                raise
            except CANNOT_RUN:
                continue
        choices.append(min(timed)[2])
    return Picks(tuple(choices), "measured on this card")


def _compile(launches: Iterable[Callable[[], None]]) -> None:
    """Launch once what may not be compiled yet, side by side: nearly all of the time a new card takes."""
    with ThreadPoolExecutor(min(16, usable_cores())) as pool:
        list(pool.map(lambda launch: launch(), launches))
    torch.cuda.synchronize()


def _run_once(group: CudaGroup, choice: Choice, given: torch.Tensor, out: torch.Tensor) -> None:
    device = group.weight.device
    with torch.cuda.device(device), suppress(*CANNOT_RUN):
        group.run(choice, given, out, overlap=can_overlap(device))


def _first_launches(planned: Iterable[tuple[CudaGroup, Picks, torch.dtype]]) -> Iterable[Callable[[], None]]:
    """A launch of few rows for every kernel that proofs of these picks need."""
    seen = set()
    for group, picks, out_dtype in planned:
        law = group.in_order(_MOST_ROWS)
        for most, choice in [(1, law), *zip(ROW_LIMITS, picks.choices, strict=True)]:
            if choice.kind == "library" or not group.can_run(choice, out_dtype):
                continue
            given, out = _trial(group, out_dtype, min(_PROVED_AT.get(most, _PROVED_ABOVE)))
            kernel = (choice, group.kernel_of(choice, given, out))
            if kernel not in seen:
                seen.add(kernel)
                yield partial(_run_once, group, choice, given, out)


def _candidates(group: CudaGroup, most: int, out_dtype: torch.dtype) -> Iterable[Choice]:
    yield group.in_order(most)
    if group.dtype == torch.float32:
        for plain in _PLAIN[next((limit for limit in _PLAIN if most <= limit), max(_PLAIN))]:
            yield from _fitting(group, Choice("plain", Plain(*plain)), out_dtype)
        return
    for narrow in _NARROW.get(most, ()):
        yield from _fitting(group, Choice("narrow", Narrow(*narrow)), out_dtype)
    if group.columns <= _FEW_COLUMNS < group.depth:
        for few in _FEW.get(next((limit for limit in _FEW if most <= limit), 0), ()):
            yield from _fitting(group, Choice("narrow", few), out_dtype)
    for tile in _TILES[min(max(most, 16), 128)]:
        yield from _fitting(group, Choice("tile", Config(*tile)), out_dtype)
    if most > 8:
        yield from _fitting(group, Choice("library"), out_dtype)


def _fitting(group: CudaGroup, choice: Choice, out_dtype: torch.dtype) -> list[Choice]:
    return [choice] if group.can_run(choice, out_dtype) else []


def _time_us(groups: Sequence[CudaGroup], choice: Choice, given: torch.Tensor, out: torch.Tensor) -> float:
    """Median microseconds of one launch, of a captured chain of them over different weights."""

    def chain() -> None:
        for group in groups:
            group.run(choice, given, out, overlap=can_overlap(group.weight.device))

    chain()
    torch.cuda.synchronize()
    graph = captured(chain)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(groups))
    return float(statistics.median(times[1:]))


# -- what is known


def known_choices(group: CudaGroup, known: Mapping[str, tuple[Choice, ...]]) -> tuple[Choice, ...] | None:
    """What serves a group, else what serves its shape behind another op; None: it has not been measured."""
    return known.get(group.key, known.get(group.shape))


def _document(choice: Choice) -> list[Any]:
    layout = choice.layout
    return [choice.kind, *([] if layout is None else vars(layout).values())]


def _choice(item: Sequence[Any]) -> Choice:
    kind, *layout = item
    layouts: dict[str, Any] = {"narrow": Narrow, "plain": Plain, "tile": Config, "library": lambda: None}
    return Choice(kind, layouts[kind](*map(int, layout)))


def _choices(text: str) -> dict[str, tuple[Choice, ...]]:
    """What a file of picks says; shapes that are told in a way of another version are left out."""
    known = {}
    for key, items in dict(json.loads(text)["picks"]).items():
        try:
            choices = tuple(_choice(item) for item in items)
        except (ValueError, KeyError, TypeError):
            continue
        if len(choices) == len(ROW_LIMITS):
            known[key] = choices
    return known


def _slug(element: torch.dtype) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return f"{name}-{str(element).removeprefix('torch.')}"


def _shipped(element: torch.dtype) -> dict[str, tuple[Choice, ...]]:
    """What comes with kittiwake for this card."""
    file = files("kittiwake.layers").joinpath("cuda_picks", f"{_slug(element)}.json")
    return _choices(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _cache_file(element: torch.dtype) -> Path:
    versions = re.sub(r"[^0-9A-Za-z.]+", "-", f"torch{torch.__version__}-triton{triton.__version__}")
    return cache_dir() / "cuda" / f"picks-{_slug(element)}-{versions}.json"


def _found(element: torch.dtype) -> dict[str, tuple[Choice, ...]]:
    """What an earlier load measured; a file that cannot be read is as good as none."""
    try:
        return _choices(_cache_file(element).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _keep(element: torch.dtype, news: Mapping[str, tuple[Choice, ...]]) -> None:
    """Add to what later loads find; a cache that cannot be written costs time, nothing else."""
    path = _cache_file(element)
    picks = {key: [_document(choice) for choice in choices] for key, choices in (_found(element) | dict(news)).items()}
    document = {"card": torch.cuda.get_device_name(), "picks": picks}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError:
        pass
