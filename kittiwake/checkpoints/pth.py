"""Files written by ``torch.save``: zip archives (mapped) and the older plain pickles (read into memory).

A pickle is a program. It is read by ``torch.load(weights_only=True)``, which runs none of it, and before that every
global it asks for is looked up in a short list of what a table of dense tensors needs; anything else is refused by name.
"""

from __future__ import annotations

import io
import pickletools
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kittiwake.checkpoints.files import GET_AGAIN, FileStamp, quoted
from kittiwake.checkpoints.reader import FileSource, TensorInfo
from kittiwake.checkpoints.safetensors import DTYPES
from kittiwake.errors import CheckpointError

MAX_PICKLE_BYTES = 16 << 20
"""A pickle of names and shapes takes some 150 bytes a tensor; the reader is slow on more than this."""
CHECK_ALL_BELOW_BYTES = 64 << 20
"""Files up to this size have the checksum of every member checked; of larger ones, all but the tensor data."""
_LEGACY_PICKLES = 5
"""Magic number, protocol, system, the object, the storage keys; raw data follows."""
_LOCAL_HEADER_BYTES = 30

_RESAVE = "on a machine where the file is trusted, save a plain dict of its tensors again (best as safetensors)"

_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
    *(f"torch {name}Storage" for name in _STORAGES),
    *(str(dtype).replace(".", " ") for dtype in DTYPES.values()),
}
_OTHER_TENSORS = {
    "torch._utils _rebuild_sparse_tensor": "sparse",
    "torch._utils _rebuild_sparse_csr_tensor": "sparse",
    "torch._utils _rebuild_nested_tensor": "nested",
    "torch._utils _rebuild_qtensor": "quantised",
    "torch._utils _rebuild_meta_tensor_no_storage": "meta (no data at all)",
    "torch._utils _rebuild_device_tensor_from_numpy": "numpy-backed",
    "torch._utils _rebuild_device_tensor_from_cpu_tensor": "device-bound",
    "torch._tensor _rebuild_from_type_v2": "subclassed",
    **{f"torch {name}Storage": "quantised" for name in ("QInt8", "QInt32", "QUInt8", "QUInt4x2", "QUInt2x4")},
    **{f"torch Complex{name}Storage": "complex" for name in ("Float", "Double")},
}


class PthSource(FileSource):
    """The tensors of a torch file; of a zip archive they stay in the file until touched."""

    def __init__(
        self,
        stamp: FileStamp,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None,
        config_files: Sequence[Path],
    ) -> None:
        self._tensors = dict(tensors)
        infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
        super().__init__(stamp.path, "pth", infos, [stamp], config, (stamp.path, *config_files))

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()

    def close(self) -> None:
        """Let go of the file. Tensors already read stay valid: they hold their mapping."""
        super().close()
        self._tensors.clear()


def open_pth(stamp: FileStamp, config: Mapping[str, Any] | None, config_files: Sequence[Path]) -> PthSource:
    """Open a torch file of either kind.

    A zip archive is mapped: members must be stored uncompressed, lie apart and inside the file, and have as many bytes
    as the tensors claim. Checksums cover the pickle always and the data only in files up to 64 MiB (an archive saved
    with checksums switched off has none to check). An older pickle is read into private memory; it has no checksums, and
    bytes after its last storage are not looked at.

    Raises CheckpointError for a file that is cut short or damaged, tries to run code, holds anything but one dict of
    names to dense CPU-loadable tensors, or whose tensors reach outside their storage.
    """
    path = stamp.path
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")
            file.seek(0)
            member_bytes = _check_archive(file, stamp) if is_zip else None
            if not is_zip:
                _check_legacy(file, path)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from None
    tensors = _check_payload(_load(path, mmap=is_zip), path)
    if member_bytes is not None:
        _check_storages(tensors, member_bytes, path)
    return PthSource(stamp, tensors, config, config_files)


def _load(path: Path, mmap: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as err:  # the unpickler raises whatever a damaged stream leads it to
        reason = _reason(err)
        newer = reason.startswith("Unsupported operand")
        hint = (
            "its pickle is of another protocol than torch.save's own: save it again with that" if newer else GET_AGAIN
        )
        raise CheckpointError(f"{path} cannot be loaded: {reason}", hint) from None


def _reason(err: Exception) -> str:
    """The line of torch's message that tells the cause; its advice on how to run the file's code all the same is left out."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    if lines and lines[0].startswith("Weights only load failed"):
        lines = [line for line in lines[1:] if not line.startswith(("(1)", "(2)", "Please", "Check the"))]
    return lines[0][:200] if lines else type(err).__name__


# The zip archive around the pickle


@dataclass(frozen=True)
class _Member:
    """A member of the archive and where its bytes are in the file."""

    name: str
    crc: int
    begin: int
    end: int


def _check_archive(file: BinaryIO, stamp: FileStamp) -> list[int]:
    """Check structure, checksums and pickle; return the sizes of the filled data members in file order."""
    path = stamp.path
    members = _read_members(file, stamp)
    by_name = {member.name.partition("/")[2]: member for member in members}
    if "data.pkl" not in by_name:
        raise CheckpointError(
            f"{path} is a zip archive without data.pkl; it holds {quoted([m.name for m in members[:4]])}",
            "it was not written by torch.save: is it an archive that should be unpacked?",
        )
    pickle = by_name["data.pkl"]
    if pickle.end - pickle.begin > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path}: data.pkl holds {pickle.end - pickle.begin:,} bytes, at most {MAX_PICKLE_BYTES:,}"
        )
    # torch can save without checksums; it then leaves every one of them 0.
    has_checksums = any(member.crc for member in members)
    for member in members if has_checksums else ():
        is_data = member.name.partition("/")[2].startswith("data/")
        if not is_data or stamp.size <= CHECK_ALL_BELOW_BYTES:
            _check_crc(file, member, path)
    order = by_name.get("byteorder")
    if order is not None and (found := _bytes_of(file, order)) != b"little":
        raise CheckpointError(f"{path} has the byte order {quoted(found)}, only little-endian files are read", _RESAVE)
    _check_globals(io.BytesIO(_bytes_of(file, pickle)), 1, path)
    data = sorted((m.begin, m.end) for name, m in by_name.items() if name.startswith("data/"))
    return [end - begin for begin, end in data if end > begin]


def _read_members(file: BinaryIO, stamp: FileStamp) -> list[_Member]:
    path = stamp.path
    try:
        with zipfile.ZipFile(file) as archive:
            infos, directory = archive.infolist(), archive.start_dir
        if any(info.filename.endswith("/constants.pkl") for info in infos):
            raise CheckpointError("this is a TorchScript program, not a table of tensors", _RESAVE)
        members = [_locate(file, info) for info in infos]
    except CheckpointError as err:
        raise CheckpointError(f"{path}: {err.message}", err.hint) from None
    except Exception as err:  # zipfile raises many kinds on a damaged directory
        raise CheckpointError(
            f"{path} is not a whole zip archive: {str(err) or type(err).__name__}", GET_AGAIN
        ) from None
    if len({member.name for member in members}) != len(members):
        raise CheckpointError(f"{path} holds two members of one name", GET_AGAIN)
    if len({member.name.partition("/")[0] for member in members}) > 1:
        raise CheckpointError(f"{path} holds more than one folder, expected one as torch.save writes", GET_AGAIN)
    position = 0
    for member in sorted(members, key=lambda member: (member.begin, member.end)):
        if member.begin < position or member.end > directory:
            raise CheckpointError(f"{path}: member {quoted(member.name)} overlaps another part of the file", GET_AGAIN)
        position = member.end
    return members


def _locate(file: BinaryIO, info: zipfile.ZipInfo) -> _Member:
    """Where a member's bytes lie: behind its own header, whose name and extra field have lengths of their own."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise CheckpointError(f"member {quoted(info.filename)} is compressed, torch.save stores members as they are")
    if info.flag_bits & 0x1:
        raise CheckpointError(f"member {quoted(info.filename)} is encrypted")
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    if header[:4] != b"PK\x03\x04" or file.read(name_bytes) != info.orig_filename.encode():
        raise CheckpointError(f"member {quoted(info.filename)} is not where the directory says", GET_AGAIN)
    begin = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    return _Member(info.filename, info.CRC, begin, begin + info.file_size)


def _blocks(file: BinaryIO, member: _Member) -> Iterator[bytes]:
    file.seek(member.begin)
    left = member.end - member.begin
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        left -= len(block)
        yield block


def _bytes_of(file: BinaryIO, member: _Member) -> bytes:
    return b"".join(_blocks(file, member))


def _check_crc(file: BinaryIO, member: _Member, path: Path) -> None:
    crc = 0
    for block in _blocks(file, member):
        crc = zlib.crc32(block, crc)
    if crc != member.crc:
        raise CheckpointError(f"{path}: the checksum of member {quoted(member.name)} does not hold", GET_AGAIN)


# The pickle


def _check_legacy(file: BinaryIO, path: Path) -> None:
    """The pickles at the head of an older file, before torch sees it."""
    if tarfile.is_tarfile(path):
        # torch.load would unpack a tar into a temporary folder.
        raise CheckpointError(f"{path} is a tar archive, which kittiwake does not read", "unpack it first")
    _check_globals(io.BytesIO(file.read(MAX_PICKLE_BYTES)), _LEGACY_PICKLES, path)


def _check_globals(stream: io.BytesIO, pickles: int, path: Path) -> None:
    """Look up every global that the next ``pickles`` pickles ask for. Reads opcodes; runs nothing."""
    try:
        for _ in range(pickles):
            for name in _globals_of(stream):
                _check_global(name, path)
    except CheckpointError:
        raise
    except Exception as err:  # pickletools raises many kinds on bytes that are no pickle
        raise CheckpointError(
            f"{path} is not a whole PyTorch pickle: {str(err)[:200] or type(err).__name__}",
            "the file is damaged, or not what its name says",
        ) from None


def _globals_of(stream: io.BytesIO) -> Iterator[str]:
    """Names "module name" as opcodes ask for them; from protocol 4 on they are two strings pushed (or recalled) before."""
    strings: list[str] = []
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif opcode.name == "STACK_GLOBAL":
            yield " ".join(strings[-2:]) if len(strings) > 1 else "a name made while loading"
        elif opcode.name in ("EXT1", "EXT2", "EXT4"):
            yield f"the extension {argument}"
        elif isinstance(argument, str):
            strings = [*strings[-1:], argument]
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else ""
        elif opcode.name.endswith("BINGET") and argument in memo:
            strings = [*strings[-1:], memo[argument]]


def _check_global(name: str, path: Path) -> None:
    if name in _ALLOWED:
        return
    if name in _OTHER_TENSORS:
        raise CheckpointError(f"{path} holds a {_OTHER_TENSORS[name]} tensor, only plain dense ones are read", _RESAVE)
    shown = quoted(name.replace(" ", ".") if name.count(" ") == 1 else name)
    raise CheckpointError(f"{path} tries to run code: its pickle asks for {shown}; nothing was run", _RESAVE)


# What came out


def _check_payload(payload: Any, path: Path) -> dict[str, torch.Tensor]:
    if not isinstance(payload, dict):
        kind = type(payload).__name__
        raise CheckpointError(f"{path} holds a value of type {kind}, expected a dict of names to tensors", _RESAVE)
    for key, value in payload.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{path} has the key {quoted(key)} ({type(key).__name__}), expected names", _RESAVE)
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(*_describe_stranger(key, value, payload, path))
        _check_tensor(f"{path}: tensor {quoted(key)}", value)
    return payload


def _describe_stranger(key: str, value: Any, payload: Mapping[Any, Any], path: Path) -> tuple[str, str]:
    """Message and hint for an entry that is no tensor; most often a checkpoint wrapped by a training program."""
    if isinstance(value, dict):
        tensors = sum(isinstance(inner, torch.Tensor) for inner in value.values())
        others = [other for other in payload if other != key]
        beside = f" (beside it: {quoted(others[:5])})" if others else ""
        message = f"{path}: the entry {quoted(key)} is a dict of {tensors} tensors, not a tensor{beside}"
        return message, f"this is a wrapped checkpoint: save the table under {quoted(key)} alone and open that"
    return f"{path}: the entry {quoted(key)} is of type {type(value).__name__}, not a tensor", _RESAVE


def _check_tensor(where: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise CheckpointError(f"{where} is not a plain dense tensor ({tensor.layout}, {tensor.device})", _RESAVE)
    if tensor.dtype not in DTYPES.values():
        raise CheckpointError(f"{where} has the dtype {tensor.dtype}, which is not read", _RESAVE)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span + 1) * tensor.element_size() if tensor.numel() else 0
    stored = tensor.untyped_storage().nbytes()
    if needed > stored:
        raise CheckpointError(f"{where} reaches {needed:,} bytes into a storage of {stored:,}", GET_AGAIN)
    if tensor.numel() * tensor.element_size() > stored:
        raise CheckpointError(f"{where} repeats its storage: {tuple(tensor.shape)} out of {stored:,} bytes", _RESAVE)


def _check_storages(tensors: Mapping[str, torch.Tensor], member_bytes: Sequence[int], path: Path) -> None:
    """Storages and data members pair off by position in the file; a claim beyond its member would read a neighbour's."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    claimed = [size for _, size in sorted(storages.items()) if size]
    if claimed != list(member_bytes):
        raise CheckpointError(
            f"{path}: its tensors claim {len(claimed)} storages of {sum(claimed):,} bytes, "
            f"the archive holds {len(member_bytes)} of {sum(member_bytes):,}",
            GET_AGAIN,
        )
