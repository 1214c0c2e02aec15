"""Small tables of rows in files, and gathers from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kittiwake.checkpoints.reader import FilePlace
from kittiwake.checkpoints.row_table import BLOCKS, RowTable
from kittiwake.ops.row_reads import reference


class SmallTable:
    """Rows of ``values`` random finite numbers in files ``part-N``, each part behind some bytes that are not its own."""

    def __init__(
        self, folder: Path, counts: Sequence[int], values: int = 160, kind: str = "BF16", seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        block, block_bytes = BLOCKS[kind]
        row_bytes = values // block * block_bytes
        self.paths = [folder / f"part-{number}" for number in range(len(counts))]
        self.begins = [int(rng.integers(0, 5000)) for _ in counts]
        packed = []
        for path, begin, count in zip(self.paths, self.begins, counts, strict=True):
            rows = rng.integers(0, 256, (count, row_bytes), dtype=np.uint8)
            width = {"F32": 4, "F16": 2, "BF16": 2}.get(kind, block_bytes)
            # the byte that holds most of an exponent: of every number, or of a block's scale
            rows.reshape(-1, width)[:, 1 if block > 1 else width - 1] &= 0xBB
            path.write_bytes(rng.bytes(begin) + rows.tobytes() + b"end")
            packed.append(rows)
        self.values = np.stack([reference.decode(row.tobytes(), kind) for row in np.concatenate(packed)])
        places = [
            FilePlace(path, begin, count * row_bytes, kind)
            for path, begin, count in zip(self.paths, self.begins, counts, strict=True)
        ]
        self.table = RowTable(places, values)

    def overwrite(self, row: int, data: bytes) -> None:
        """Write over a row in its file."""
        path, begin = self.table.where(row)
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(data)
