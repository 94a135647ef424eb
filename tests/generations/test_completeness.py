"""Whole files pass, torn and hostile ones are refused, and no check reads without a bound."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CorruptError
from cachefs.generations.completeness import (
    HEADER_MAX,
    check_file,
    check_generation,
    check_safetensors,
    check_zip,
    dcp_files,
    index_files,
    is_zip,
    read_whole,
)

from .fake_torch import metadata_pickle
from .world import TENSORS, ZIP, Bytes, safetensors_bytes

NAMES = ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp")


def test_zip_as_torch_writes_it():
    assert is_zip(Bytes(ZIP))
    check_zip(Bytes(ZIP))


@pytest.mark.parametrize("cut", [1, 10, 21, 22, 23, 100, len(ZIP) - 4])
def test_torn_zip(cut):
    with pytest.raises(CorruptError, match="zip"):
        check_zip(Bytes(ZIP[:-cut]))


def test_zip_with_a_comment_and_with_bytes_after_its_end():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a"), b"x")
        archive.comment = b"PK\x05\x06 a comment that looks like a record"
    check_zip(Bytes(out.getvalue()))
    with pytest.raises(CorruptError):
        check_zip(Bytes(ZIP + b"stale tail of a longer file"))


def test_zip_with_a_hole_in_front_of_the_directory():
    with pytest.raises(CorruptError, match="directory"):
        check_zip(Bytes(b"\0" * 10 + ZIP))
    at = struct.unpack_from("<L", ZIP, len(ZIP) - 6)[0]
    with pytest.raises(CorruptError, match="no zip directory"):
        check_zip(Bytes(ZIP[:at] + b"\0" * 4 + ZIP[at + 4 :]))


def as_zip64(data: bytes) -> bytes:
    """Rewrite the end of an archive as torch's writer does: a zip64 record and locator in front of the end record."""
    record = list(struct.unpack("<4s4H2LH", data[-22:]))
    end = len(data) - 22
    record64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, record[3], record[4], record[5], record[6])
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    record[3] = record[4] = 0xFFFF
    record[5] = record[6] = 0xFFFFFFFF
    return data[:end] + record64 + locator + struct.pack("<4s4H2LH", *record)


def test_zip64():
    data = as_zip64(ZIP)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    check_zip(Bytes(data))
    for cut in (1, 23, 43, 60):
        with pytest.raises(CorruptError):
            check_zip(Bytes(data[:-cut]))
    broken = bytearray(data)
    broken[-22 - 20 - 56] = 0
    with pytest.raises(CorruptError, match="zip64"):
        check_zip(Bytes(bytes(broken)))


def test_zip64_records_without_need_are_accepted():
    data = as_zip64(ZIP)
    plain = struct.unpack("<4s4H2LH", ZIP[-22:])
    check_zip(Bytes(data[:-22] + struct.pack("<4s4H2LH", *plain)))


class Counting(Bytes):
    """Knows the most that was asked for at once; claims any size."""

    def __init__(self, data, size=None):
        super().__init__(data)
        self.claimed = len(data) if size is None else size
        self.most = 0

    @property
    def size(self):
        return self.claimed

    def read(self, offset, length):
        self.most = max(self.most, length)
        return super().read(offset, length)


def test_zip_check_reads_little():
    source = Counting(b"PK\x03\x04" + bytes(1 << 20) + ZIP)
    with pytest.raises(CorruptError):
        check_zip(source)
    assert source.most < 70_000


def test_safetensors():
    check_safetensors(Bytes(TENSORS))
    check_safetensors(Bytes(safetensors_bytes(1)))
    header = b'{"__metadata__":{"a":"b"}}'
    check_safetensors(Bytes(struct.pack("<Q", len(header)) + header))


def with_header(header: bytes, data: bytes = b"") -> Bytes:
    return Bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize(
    "source",
    [
        Bytes(b""),
        Bytes(TENSORS[:7]),
        Bytes(TENSORS[:40]),
        Bytes(TENSORS[:-1]),
        Bytes(TENSORS + b"x"),
        Bytes(bytes(len(TENSORS))),
        with_header(b"{"),
        with_header(b"[1]"),
        with_header(b'{"a": 1}'),
        with_header(b'{"a": {"data_offsets": [0]}}'),
        with_header(b'{"a": {"data_offsets": [4, 2]}}', b"xx"),
        with_header(b'{"a": {"data_offsets": [-1, 2]}}', b"xx"),
        with_header(b"\xff\xfe\xfd"),
    ],
)
def test_broken_safetensors(source):
    with pytest.raises(CorruptError):
        check_safetensors(source)


def test_huge_safetensors_header_is_not_read():
    source = Counting(struct.pack("<Q", HEADER_MAX + 1) + b"{}", size=HEADER_MAX * 10)
    with pytest.raises(CorruptError, match="header"):
        check_safetensors(source)
    assert source.most == 8


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("tensors", [1, 5])
def test_dcp_names_in_every_pickle_protocol(protocol, tensors):
    assert dcp_files(metadata_pickle(NAMES, protocol, tensors)) == set(NAMES)


def test_dcp_names_of_a_key_that_ends_like_a_shard():
    assert dcp_files(metadata_pickle(("__0_0.distcp",), 2)) == {"__0_0.distcp"}


def test_dcp_names_never_load_the_pickle():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was loaded",))

    assert dcp_files(pickle.dumps([Bomb(), {"relative_path": "__0_0.distcp"}])) == {"__0_0.distcp"}


@pytest.mark.parametrize("data", [b"", b"\x80", b"not a pickle", b"\x80\x02}", b"\x80\x02h\x05."])
def test_metadata_that_is_no_whole_pickle(data):
    if data.endswith(b"."):
        assert dcp_files(data) == frozenset()
        return
    with pytest.raises(CorruptError, match=r"\.metadata"):
        dcp_files(data)


@given(st.integers(1, len(metadata_pickle(NAMES)) - 1))
def test_truncated_metadata(cut):
    with pytest.raises(CorruptError):
        dcp_files(metadata_pickle(NAMES)[:-cut])


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data):
    for check in (dcp_files, index_files):
        try:
            check(data)
        except CorruptError:
            pass
    for check in (check_zip, check_safetensors):
        try:
            check(Bytes(data))
        except CorruptError:
            pass


def test_index():
    data = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}})
    assert index_files(data.encode()) == {"x.safetensors"}
    for bad in (b"", b"{}", b"[]", b'{"weight_map": {"a": 1}}', b"\xff"):
        with pytest.raises(CorruptError):
            index_files(bad)


def test_read_whole_is_bounded():
    assert read_whole(Bytes(b"abc")) == b"abc"
    with pytest.raises(CorruptError, match="at most"):
        read_whole(Bytes(b"abc"), 2)
    with pytest.raises(CorruptError, match="ended after"):
        read_whole(Counting(b"abc", size=5))


@pytest.mark.parametrize(
    ("name", "data", "check"),
    [
        ("a.pt", ZIP, "zip"),
        ("a.pth", ZIP, "zip"),
        ("a.ckpt", ZIP, "zip"),
        ("pytorch_model.bin", ZIP, "zip"),
        ("a.safetensors", TENSORS, "safetensors"),
        ("a.pt", b"\x80\x02legacy", None),
        ("__0_0.distcp", ZIP[:20], None),
        ("notes.txt", b"PK\x03\x04", None),
        ("empty.pt", b"", None),
    ],
)
def test_check_file(name, data, check):
    assert check_file(name, Bytes(data)) == check


def generation(**changes):
    files = {
        ".metadata": metadata_pickle(NAMES),
        **dict.fromkeys(NAMES, b"shard"),
        "__7_0.distcp": b"",
        "meta.pt": ZIP,
        "hf/model.safetensors.index.json": b'{"weight_map": {"a": "model.safetensors"}}',
        "hf/model.safetensors": TENSORS,
        "notes": b"",
    }
    files.update(changes)
    return {name: Bytes(data) for name, data in files.items() if data is not None}


def test_generation():
    assert check_generation(generation(), "directory", "dcp") == ["dcp", "index", "safetensors", "zip"]
    assert check_generation({"model.pt": Bytes(ZIP)}, "file", "single") == ["zip"]
    assert check_generation({"notes": Bytes(b"")}, "directory", "hf-trainer") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"__1_0.distcp": None}, r"\.metadata: lists __1_0\.distcp"),
        ({"hf/model.safetensors": None}, r"hf/model\.safetensors\.index\.json: lists model\.safetensors"),
        ({"hf/model.safetensors": TENSORS[:-1]}, r"hf/model\.safetensors: safetensors file of"),
        ({"meta.pt": ZIP[:-1]}, r"meta\.pt: no zip end record"),
        ({".metadata": metadata_pickle(NAMES)[:-1]}, r"\.metadata: .*not a whole pickle"),
        ({".metadata": None}, r"\.metadata: not in the generation"),
    ],
)
def test_broken_generation_names_the_file(changes, reason):
    with pytest.raises(CorruptError, match=reason):
        check_generation(generation(**changes), "directory", "dcp")
