"""Is a file whole? Format checks that read a few bounded ranges, of a local file or of an object in the store alike.

Nothing here trusts what it reads: every length is bounded before it is used, and pickles are scanned, never loaded.
Every check raises CorruptError that says what is wrong; `check_generation` also names the file.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Mapping
from typing import Final, Literal, Protocol

import msgspec

from cachefs.errors import CorruptError

HEADER_MAX: Final = 100_000_000
"""Longest safetensors header, bytes (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
METADATA_MAX: Final = 1 << 30
"""Longest DCP `.metadata` and index that is read, bytes. Metadata of 10,000 ranks is some hundred MB."""
_EOCD = struct.Struct("<4s4H2LH")
_EOCD64_LOCATOR = struct.Struct("<4sLQL")
_EOCD64 = struct.Struct("<4sQ2H2L4Q")


class Source(Protocol):
    """The bytes of one file."""

    @property
    def size(self) -> int:
        """Return the length in bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`, fewer at the end of the file."""


def is_zip(source: Source) -> bool:
    """Return whether the file starts as a zip archive, as torch.save writes since 1.6."""
    return source.read(0, 4) == b"PK\x03\x04"


def check_zip(source: Source) -> None:
    """Check the end record (zip64 too) and that the central directory it points at lies right before it.

    torch.save writes strictly forward and the directory last (PyTorchStreamWriter), so a whole end means a whole file.
    """
    tail_at = max(0, source.size - _EOCD.size - 0xFFFF)
    tail = source.read(tail_at, source.size - tail_at)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if len(tail) - at >= _EOCD.size:
            record = _EOCD.unpack_from(tail, at)
            if at + _EOCD.size + record[7] == len(tail):
                return _check_directory(source, tail_at + at, count=record[4], size=record[5], offset=record[6])
        at = tail.rfind(b"PK\x05\x06", 0, at)
    raise CorruptError("no zip end record: the file was not written to its end")


def _check_directory(source: Source, end: int, *, count: int, size: int, offset: int) -> None:
    # PyTorchStreamWriter always adds the zip64 records, also where the plain ones would do.
    locator = source.read(max(0, end - _EOCD64_LOCATOR.size), _EOCD64_LOCATOR.size)
    if len(locator) == _EOCD64_LOCATOR.size and locator[:4] == b"PK\x06\x07":
        at = _EOCD64_LOCATOR.unpack(locator)[2]
        raw = source.read(at, _EOCD64.size) if at + _EOCD64.size <= end else b""
        if len(raw) != _EOCD64.size or raw[:4] != b"PK\x06\x06":
            raise CorruptError("zip64 end record is missing or torn")
        record = _EOCD64.unpack(raw)
        count, size, offset, end = record[7], record[8], record[9], at
    if offset + size != end:
        raise CorruptError(f"zip directory ends at {offset + size}, not at its end record at {end}")
    if count and source.read(offset, 4) != b"PK\x01\x02":
        raise CorruptError(f"no zip directory at {offset}")


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def check_safetensors(source: Source) -> None:
    """Check that the header is sound and that the file ends exactly where the last tensor ends."""
    prefix = source.read(0, 8)
    if len(prefix) < 8:
        raise CorruptError(f"{len(prefix)} bytes are too few for a safetensors header")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= HEADER_MAX or 8 + length > source.size:
        raise CorruptError(f"safetensors header of {length} bytes in a file of {source.size}")
    try:
        raw = msgspec.json.decode(source.read(8, length), type=dict[str, msgspec.Raw])
        spans = [
            msgspec.json.decode(value, type=_Tensor).data_offsets for key, value in raw.items() if key != "__metadata__"
        ]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"safetensors header is not valid: {error}") from error
    if any(not 0 <= begin <= end for begin, end in spans):
        raise CorruptError("safetensors header holds a negative span")
    expected = 8 + length + max((end for _, end in spans), default=0)
    if source.size != expected:
        raise CorruptError(f"safetensors file of {source.size} bytes, its header says {expected}")


def dcp_files(data: bytes) -> frozenset[str]:
    """Return the relative paths of the shards that a DCP `.metadata` names, without unpickling it.

    `Metadata.storage_data` maps to `_StorageInfo(relative_path, offset, length)` (torch.distributed.checkpoint
    filesystem.py), pickled as its attribute dictionary: each path is the string pushed right after "relative_path".
    """
    found: set[str] = set()
    memo: dict[int, str | None] = {}
    top: str | None = None  # the string on top of the pickle machine's stack, as far as it matters here
    opcode = None
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in _KEEP:
                continue
            if name in _PUT:
                memo[len(memo) if argument is None else argument] = top
                continue
            value = memo.get(int(argument or 0)) if name in _GET else argument if name in _TEXT else None
            if top == "relative_path" and value is not None:
                found.add(value)
            top = value
    except Exception as error:  # genops raises whatever the damaged bytes lead it to
        raise CorruptError(f".metadata is not a whole pickle: {error}") from error
    if opcode is None or opcode.name != "STOP":
        raise CorruptError(".metadata is not a whole pickle")
    return frozenset(found)


_TEXT = frozenset(
    {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING", "STRING"}
)
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_KEEP = frozenset({"FRAME", "PROTO"})


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def index_files(data: bytes) -> frozenset[str]:
    """Return the weight files that a Hugging Face `*.index.json` names (its `weight_map`)."""
    try:
        return frozenset(msgspec.json.decode(data, type=_Index).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"not a weight index: {error}") from error


def read_whole(source: Source, limit: int = METADATA_MAX) -> bytes:
    """Return all bytes of a small file. Raises CorruptError when it is longer than `limit` or ends early."""
    if source.size > limit:
        raise CorruptError(f"{source.size} bytes, at most {limit} are read")
    data = source.read(0, source.size)
    if len(data) != source.size:
        raise CorruptError(f"ended after {len(data)} of {source.size} bytes")
    return data


_TORCH = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".distcp")


def check_file(name: str, source: Source) -> str | None:
    """Check one file by its name and first bytes; return the name of the check, None when nothing is known about it.

    A file in torch's legacy format has no end mark and cannot be checked; neither can a `.distcp`, which holds several
    archives or plain bytes one after another and whose sizes `.metadata` does not tell without unpickling.
    """
    if name.endswith(".safetensors"):
        check_safetensors(source)
        return "safetensors"
    if name.endswith(_TORCH) and not name.endswith(".distcp") and is_zip(source):
        check_zip(source)
        return "zip"
    return None


def check_generation(files: Mapping[str, Source], kind: Literal["directory", "file"], preset: str) -> list[str]:
    """Check every file of a generation that has a known format, and that what its manifests list is there.

    `files` maps paths relative to the generation. Returns the names of the checks that ran, sorted. `preset` is the
    name of the preset that closed it: one whose signal is a manifest must have it. Raises CorruptError with file and
    reason.
    """
    ran: set[str] = set()
    for path in sorted(files):
        try:
            check = check_file(path, files[path])
            listed = _listed(path, files[path])
            if check:
                ran.add(check)
            if listed is not None:
                label, names = listed
                ran.add(label)
                above = path.rpartition("/")[0]
                for name in sorted(names):
                    if (f"{above}/{name}" if above else name) not in files:
                        raise CorruptError(f"lists {name}, which is not in the generation")
        except CorruptError as error:
            raise CorruptError(f"{path}: {error}") from error
    if kind == "directory" and preset == "dcp" and "dcp" not in ran:
        raise CorruptError(".metadata: not in the generation")
    return sorted(ran)


def _listed(path: str, source: Source) -> tuple[str, frozenset[str]] | None:
    name = path.rpartition("/")[2]
    if name == ".metadata":
        return "dcp", dcp_files(read_whole(source))
    if name.endswith((".safetensors.index.json", ".bin.index.json")):
        return "index", index_files(read_whole(source))
    return None
