"""Files of torch.save: tensors come out, anything else is named, and no code in them ever runs."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from kittiwake.checkpoints.pth import CHECK_ALL_BELOW_BYTES
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.errors import CheckpointError
from tests.checkpoints.cases import assert_same, make_tensors


def save(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path / "m.pth", **options)
    return path / "m.pth"


def rewrite(path: Path, edit: Any = None, compress: int = zipfile.ZIP_STORED) -> Path:
    """The same archive with ``edit(name, data) -> data`` applied to each member, and honest checksums."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in members.items():
            archive.writestr(name, edit(name, data) if edit else data)
    return path


def test_a_state_dict_with_parameters_and_views_comes_back(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    saved = OrderedDict(p=torch.nn.Parameter(base.clone()), whole=base, row=base[1], turned=base.t()[1:])
    source = open_checkpoint(save(tmp_path, saved))
    for name, tensor in saved.items():
        found = source.read(name)
        assert_same(found, tensor.detach())
        assert not found.requires_grad
    assert source.read("row").untyped_storage().data_ptr() == source.read("whole").untyped_storage().data_ptr()
    module = torch.nn.Linear(2, 3)
    assert {info.name for info in open_checkpoint(save(tmp_path, module.state_dict())).infos()} == {"weight", "bias"}


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_protocols_that_torch_reads_are_read(protocol: int, tmp_path: Path) -> None:
    assert len(open_checkpoint(save(tmp_path, make_tensors(), pickle_protocol=protocol)).infos()) == 5


def test_a_newer_pickle_protocol_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Unsupported operand 149.*another protocol"):
        open_checkpoint(save(tmp_path, make_tensors(), pickle_protocol=4))


def test_float8_comes_back(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    assert_same(open_checkpoint(save(tmp_path, {"x": tensor})).read("x"), tensor)


def test_an_archive_saved_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path, make_tensors())
    finally:
        torch.serialization.set_crc32_options(before)
    assert_same(open_checkpoint(path).read("emb.weight"), make_tensors()["emb.weight"])


PAYLOADS: dict[str, tuple[Any, str]] = {
    "list": ([torch.ones(2)], "holds a value of type list, expected a dict"),
    "tensor": (torch.ones(2), "holds a value of type Tensor"),
    "number as a key": ({"a": torch.ones(1), 3: torch.ones(1)}, r"has the key 3 \(int\)"),
    "number as a value": ({"epoch": 7}, "entry 'epoch' is of type int"),
    "text as a value": ({"note": "hi"}, "entry 'note' is of type str"),
    "list of tensors": ({"layers": [torch.ones(1)]}, "entry 'layers' is of type list"),
    "wrapped": (
        {"state_dict": make_tensors(), "epoch": 3},
        r"entry 'state_dict' is a dict of 5 tensors, not a tensor \(beside it: \['epoch'\]\).*save the table under",
    ),
    "wrapped alone": ({"model": make_tensors()}, "entry 'model' is a dict of 5 tensors"),
    "nothing": ({}, "holds no tensors"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "holds a sparse tensor"),
    "meta": ({"a": torch.empty(3, device="meta")}, "holds a meta .* tensor"),
    "complex": ({"a": torch.ones(2, dtype=torch.complex64)}, "holds a complex tensor"),
    "repeated": ({"a": torch.ones(1).expand(1000)}, r"tensor 'a' repeats its storage: \(1000,\) out of 4 bytes"),
}


@pytest.mark.filterwarnings("ignore")  # torch.save warns of sparse tensors and of its own storage classes
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("case", PAYLOADS)
def test_anything_but_a_table_of_dense_tensors_is_named(case: str, is_zip: bool, tmp_path: Path) -> None:
    payload, message = PAYLOADS[case]
    path = save(tmp_path, payload, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in caught.value.message and caught.value.hint


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_tensor_is_named(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointError, match="holds a quantised tensor"):
        open_checkpoint(save(tmp_path, {"a": tensor}))


class _Runs:
    """Pickles to a call that would create a file."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def _codes(mark: Path) -> dict[str, tuple[Any, str]]:
    return {
        "system": (_Runs(os.system, f"touch {mark}"), r"tries to run code: its pickle asks for 'posix\.system'"),
        "eval": (_Runs(eval, f"open({str(mark)!r}, 'w')"), r"asks for 'builtins\.eval'"),
        "exec": (_Runs(exec, f"open({str(mark)!r}, 'w')"), r"asks for 'builtins\.exec'"),
        "class": (_Runs(io.open, str(mark), "w"), r"asks for '_?io\.open'"),
    }


@pytest.mark.parametrize("form", ["zip", "legacy", 0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("case", ["system", "eval", "exec", "class"])
def test_code_in_a_pickle_is_named_and_never_runs(case: str, form: str | int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    payload, message = _codes(mark)[case]
    path = tmp_path / "m.pth"
    if isinstance(form, int):
        path.write_bytes(pickle.dumps({"a": payload}, protocol=form))
    else:
        torch.save({"a": payload}, path, _use_new_zipfile_serialization=form == "zip")
    message = message.replace("builtins", "(builtins|__builtin__)")  # its name in the older protocols
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "nothing was run" in caught.value.message
    assert not mark.exists()


def test_code_by_other_opcodes_is_named(tmp_path: Path) -> None:
    for program, message in (
        (b"\x80\x02(cos\nsystem\n(S'x'\ntR.", r"os\.system"),
        (b"\x80\x02(S'x'\nios\nsystem\n.", r"os\.system"),
        (b"\x80\x02\x82\x01.", "the extension 1"),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x94h\x00h\x01\x93.", r"os\.system"),
        (b"\x80\x04\x93.", "a name made while loading"),
    ):
        (tmp_path / "m.pth").write_bytes(program)
        with pytest.raises(CheckpointError, match=f"tries to run code: its pickle asks for .*{message}"):
            open_checkpoint(tmp_path / "m.pth")


def test_a_tar_is_never_handed_to_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(CheckpointError, match="is a tar archive"):
        open_checkpoint(path)


def test_a_program_archive_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("m/constants.pkl", pickle.dumps((), protocol=2))
    with pytest.raises(CheckpointError, match="TorchScript program"):
        open_checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_cut_short_anywhere_is_refused(is_zip: bool, tmp_path: Path) -> None:
    path = save(tmp_path, make_tensors(), _use_new_zipfile_serialization=is_zip)
    whole = path.read_bytes()
    for size in range(1, len(whole), 41):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"m\.pth"):
            open_checkpoint(path)


def test_a_flipped_bit_in_a_small_archive_is_noticed_by_its_checksum(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": torch.ones(100)})
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<f", 1.0) * 100)
    raw[at + 5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"checksum of member 'm/data/0' does not hold"):
        open_checkpoint(path)


def test_a_flipped_bit_in_the_pickle_of_a_large_archive_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, {"some.name": torch.zeros(CHECK_ALL_BELOW_BYTES // 4 + 1)})
    with path.open("r+b") as file:
        head = file.read(4096)
        file.seek(head.index(b"some.name"))
        file.write(b"S")
    with pytest.raises(CheckpointError, match=r"checksum of member 'm/data\.pkl' does not hold"):
        open_checkpoint(path)


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    path = rewrite(save(tmp_path, {"a": torch.zeros(100_000)}), compress=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"member 'm/data\.pkl' is compressed"):
        open_checkpoint(path)


def test_a_storage_that_claims_more_than_its_member_is_refused(tmp_path: Path) -> None:
    """The claim stays inside the file, where the neighbour's bytes would be read as this tensor's."""
    path = save(tmp_path, {"a": torch.ones(4), "b": torch.ones(200)})
    rewrite(path, lambda name, data: data[:-8] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match="claim 2 storages of 816 bytes, the archive holds 2 of 808"):
        open_checkpoint(path)


def test_a_tensor_outside_its_storage_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": torch.ones(4)})
    # The shape is the tuple (4,): K is the opcode of a one-byte integer, \x85 that of a tuple of one.
    rewrite(path, lambda name, data: data.replace(b"K\x04\x85", b"K\x99\x85") if name.endswith(".pkl") else data)
    with pytest.raises(CheckpointError, match=r"m\.pth"):
        open_checkpoint(path)


def test_a_missing_storage_and_a_big_endian_file_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": torch.ones(4)})
    rewrite(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    with pytest.raises(CheckpointError, match="byte order b'big'"):
        open_checkpoint(path)
    path = save(tmp_path, {"a": torch.ones(4)})
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist() if info.filename != "m/data/0"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*data/0"):
        open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_of_odd_structure_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    pickled = pickle.dumps({}, protocol=2)
    for members, message in (
        (["m/data.pkl", "m/data.pkl"], "two members of one name"),
        (["m/data.pkl", "n/data/0"], "more than one folder"),
        (["data.pkl"], r"without data\.pkl"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name in members:
                archive.writestr(name, pickled)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)


def test_a_huge_pickle_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pth", "w") as archive:
        archive.writestr("m/data.pkl", bytes(17 << 20))
    with pytest.raises(CheckpointError, match=r"data\.pkl holds 17,825,792 bytes"):
        open_checkpoint(tmp_path / "m.pth")
