"""Tables that stay in their files: where rows lie, what is refused, and how files are opened."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file

from kittiwake.checkpoints.reader import FilePlace, open_checkpoint
from kittiwake.checkpoints.row_table import RowTable, unpacked_table
from kittiwake.errors import CheckpointError


def write(path: Path, size: int) -> Path:
    path.write_bytes(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes())
    return path


def test_rows_go_on_from_part_to_part(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", 1000), write(tmp_path / "two", 500)
    table = RowTable(
        [FilePlace(one, 10, 64, "BF16"), FilePlace(two, 4, 32, "BF16"), FilePlace(one, 500, 16, "BF16")], 8
    )
    assert table.rows == 4 + 2 + 1 and table.row_bytes == 16 and table.nbytes == 112
    assert [table.where(row) for row in (0, 3, 4, 6)] == [(one, 10), (one, 58), (two, 4), (one, 500)]
    assert table.describe()["files"] == 2


@pytest.mark.parametrize(
    ("part", "values", "told"),
    [
        (("BF16", 0, 33), 8, "33 bytes is not a number of rows of 16 bytes"),
        (("BF16", 90, 16), 8, "is cut short: rows reach byte 106, the file has 100"),
        (("BF16", -1, 16), 8, "cut short"),
        (("BF16", 0, 0), 8, "0 bytes is not a number of rows"),
        (("Q4_K", 0, 16), 8, "of the kind 'Q4_K'"),
        (("Q8_0", 0, 34), 33, "rows of 33 numbers, Q8_0 needs a multiple of 32"),
        (("F32", 0, 16), 0, "rows of 0 numbers"),
        (("F32", 0, 16), 1 << 20, "at most 1,048,576 are read"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, part: tuple[str, int, int], values: int, told: str) -> None:
    path = write(tmp_path / "table", 100)
    kind, begin, size = part
    with pytest.raises(CheckpointError, match=told):
        RowTable([FilePlace(path, begin, size, kind)], values)


def test_parts_of_different_kinds_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "table", 100)
    with pytest.raises(CheckpointError, match="the kind 'F16', the table began with BF16"):
        RowTable([FilePlace(path, 0, 16, "BF16"), FilePlace(path, 16, 16, "F16")], 8)
    with pytest.raises(CheckpointError, match="does not exist"):
        RowTable([FilePlace(tmp_path / "nothing", 0, 16, "BF16")], 8)
    with pytest.raises(CheckpointError, match="at least one part"):
        RowTable([], 8)


def test_a_file_that_changed_since_is_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "table", 100)
    table = RowTable([FilePlace(path, 0, 96, "BF16")], 8)
    write(path, 200)
    with pytest.raises(CheckpointError, match="changed while it was open"):
        table.open_files()


def test_a_file_system_that_refuses_direct_reads_gets_buffered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = RowTable([FilePlace(write(tmp_path / "table", 100), 0, 96, "BF16")], 8)
    real = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", str(path))
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    files = table.open_files()
    assert files.buffered_because == "direct reads are refused: Invalid argument" and files.aligns == (1,)
    assert os.pread(files.descriptors[0], 3, 0) == (tmp_path / "table").read_bytes()[:3]
    files.close()


def test_places_in_safetensors_and_gguf_hold_the_values(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "table": torch.randn(10, 32).bfloat16(), "z": torch.randn(1)}
    save_file(tensors, tmp_path / "m.safetensors")
    writer = GGUFWriter(tmp_path / "m.gguf", "toy")
    packed = np.random.default_rng(1).integers(0, 256, (10, 34), dtype=np.uint8)
    writer.add_tensor("a", np.zeros(5, np.float32))
    writer.add_tensor("table", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = {"m.safetensors": ("BF16", tensors["table"].view(torch.uint8).numpy()), "m.gguf": ("Q8_0", packed)}
    for name, (kind, stored) in wanted.items():
        with open_checkpoint(tmp_path / name) as source:
            place = source.place("table")
            assert (place.path, place.kind, place.nbytes) == (tmp_path / name, kind, stored.nbytes)
            assert place.path.read_bytes()[place.begin :][: place.nbytes] == stored.tobytes()
            assert RowTable([place], 32).rows == 10
            with pytest.raises(CheckpointError, match="no tensor 'tabel'"):
                source.place("tabel")
        with pytest.raises(CheckpointError, match="was closed"):
            source.place("table")


def test_a_pickle_tells_no_place(tmp_path: Path) -> None:
    torch.save({"table": torch.zeros(2, 2)}, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as source, pytest.raises(CheckpointError, match="row by row"):
        source.place("table")


def test_a_table_of_another_kind_is_unpacked_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(6, 5, dtype=torch.float64)
    save_file({"table": values, "vector": torch.zeros(3)}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as source:
        table = unpacked_table(source, "table")
        place = table.parts[0]
        assert (table.rows, table.kind) == (6, "BF16")
        assert place.path.read_bytes() == values.bfloat16().view(torch.uint8).numpy().tobytes()
        with pytest.raises(CheckpointError, match="expected a matrix"):
            unpacked_table(source, "vector")
        monkeypatch.setattr("kittiwake.checkpoints.row_table.MAX_UNPACKED_BYTES", 59)
        with pytest.raises(CheckpointError, match="would take 60 bytes unpacked, at most 59"):
            unpacked_table(source, "table")
    del table
    assert not place.path.exists()
