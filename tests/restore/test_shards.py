"""Reading shards: every byte is what was pinned, or the error names the shard."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CorruptError, NoStoreError, UnavailableError
from cachefs.restore.shards import StoreSource, check_arithmetic, check_object, read_shard
from cachefs.restore.verify import verify
from cachefs.store.directory import DirectoryStore
from cachefs.store.memory import MemoryStore
from tests.restore.make import PART, manifest, memory, shard
from tests.store.faults import FaultyStore, Rule, corrupted, no_faults, rules, throttled

DATA = b"0123456789abcdefghij"


@given(st.binary(max_size=5 * PART), st.booleans())
def test_round_trip(data: bytes, ranges: bool) -> None:
    store = memory()
    out = bytearray(len(data))

    def sink(offset: int, part: bytes) -> None:
        out[offset : offset + len(part)] = part

    read_shard(store, shard(store, "a", data), sink, ranges=ranges)
    assert bytes(out) == data


def _change(store: MemoryStore, key: str, body: bytes) -> None:
    store._versions[key] = [msgspec.structs.replace(version, body=body) for version in store._versions[key]]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    "body",
    [DATA[:-1], DATA + b"!", DATA[:8], b"", *(DATA[:at] + b"!" + DATA[at + 1 :] for at in (0, 7, 8, 19))],
)
def test_other_bytes_are_refused(body: bytes, ranges: bool) -> None:
    store = memory()
    made = shard(store, "model.bin", DATA)
    _change(store, made.pin.key, body)
    if ranges and body == DATA + b"!":
        read_shard(store, made)  # every byte that was pinned is there; nothing reads further
        return
    with pytest.raises(CorruptError, match=r"model\.bin"):
        read_shard(store, made, ranges=ranges)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("data", [DATA, b""])
def test_a_version_that_is_gone_is_named(data: bytes, ranges: bool) -> None:
    store = memory()
    made = shard(store, "model.bin", data)
    store.delete_version(made.pin.key, made.pin.version_id)
    with pytest.raises(CorruptError, match=rf"model\.bin \({made.pin.key} version {made.pin.version_id}\): .* gone"):
        read_shard(store, made, ranges=ranges)
    with pytest.raises(CorruptError, match="gone"):
        check_object(store, made)


def test_a_bit_flipped_on_the_way_is_noticed() -> None:
    for operation, ranges in (("get_range", True), ("get_stream", False)):
        store = FaultyStore(memory(), rules(Rule(operation, corrupted)))
        with pytest.raises(CorruptError, match="part 1 has other bytes"):
            read_shard(store, shard(store.inner, "a", DATA), ranges=ranges)  # type: ignore[arg-type]


def test_nothing_unverified_reaches_the_sink_with_ranges() -> None:
    store = memory()
    made = shard(store, "a", DATA)
    _change(store, made.pin.key, DATA[:8] + b"!" + DATA[9:])
    got: list[bytes] = []
    with pytest.raises(CorruptError):
        read_shard(store, made, lambda _offset, data: got.append(data))
    assert got == [DATA[:8]]


def test_a_store_that_is_not_there_is_not_damage(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    store = DirectoryStore(str(root))
    made = shard(store, "a", DATA)
    root.rename(tmp_path / "away")
    for ranges in (True, False):
        with pytest.raises(NoStoreError):
            read_shard(store, made, ranges=ranges)
        with pytest.raises(NoStoreError):
            StoreSource(store, made, ranges=ranges).read(3, 9)
    with pytest.raises(NoStoreError):
        check_object(store, made)


@pytest.mark.parametrize("data", [DATA, b""])
def test_a_version_that_has_lost_its_bytes_is_damage(data: bytes, tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    made = shard(store, "model.bin", data)
    next(tmp_path.rglob(made.pin.version_id)).unlink()
    for ranges in (True, False):
        with pytest.raises(CorruptError, match=r"model\.bin .* has lost its bytes"):
            read_shard(store, made, ranges=ranges)
    with pytest.raises(CorruptError, match=r"model\.bin .* has lost its bytes"):
        check_object(store, made)


def test_an_unknown_outcome_is_not_damage() -> None:
    store = FaultyStore(memory(), rules(Rule("get_range", throttled)))
    with pytest.raises(UnavailableError):
        read_shard(store, shard(store.inner, "a", DATA))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"part_size": 0},
        {"part_size": 6},
        {"part_size": -8},
        {"parts": ()},
        {"parts": ("00" * 32,) * 3},
        {"parts": ("zz",) * 3},
    ],
)
def test_a_shard_must_add_up(fields: dict[str, object]) -> None:
    made = msgspec.structs.replace(shard(memory(), "a", DATA), **fields)
    with pytest.raises(CorruptError, match="shard a "):
        check_arithmetic(made)


@given(st.integers(0, 25), st.integers(0, 25), st.booleans())
def test_sources_read_like_files(offset: int, length: int, ranges: bool) -> None:
    store = memory()
    source = StoreSource(store, shard(store, "a", DATA), ranges=ranges)
    assert source.size == len(DATA)
    assert source.read(offset, length) == DATA[offset : offset + length]


def test_verify_by_checksum_reads_bytes_only_where_it_must() -> None:
    store = memory()
    with_digest = shard(store, "a", b"one part")
    info = store.put("with", b"one part", condition=None, sha256=bytes.fromhex(with_digest.pin.sha256))
    with_digest = msgspec.structs.replace(
        with_digest, pin=msgspec.structs.replace(with_digest.pin, key="with", version_id=info.version_id)
    )
    made = manifest(store, {"b": DATA})
    made = msgspec.structs.replace(made, shards=(with_digest, *made.shards))
    faulty = FaultyStore(store, no_faults)
    counted: list[int] = []
    result = verify(faulty, made, "checksum", workers=1, progress=counted.append)
    assert (result.shards, result.bytes, result.read, sum(counted)) == (2, 28, 20, 28)
    assert faulty.operations(lambda key: key == "with") == ["head"]
    assert faulty.operations(lambda key: key != "with") == ["head", *["get_range"] * 3]


def test_verify_by_checksum_refuses_what_the_store_reports() -> None:
    store = memory()
    made = manifest(store, {"model.bin": b"one part"})
    pin = made.shards[0].pin
    version = store._versions[pin.key][0]
    assert version.info is not None
    for changed in (
        msgspec.structs.replace(version.info, checksum="00" * 32),
        msgspec.structs.replace(version.info, size=7),
    ):
        store._versions[pin.key][0] = msgspec.structs.replace(version, info=changed)
        with pytest.raises(CorruptError, match=r"shard model\.bin"):
            verify(store, made, "checksum")


@pytest.mark.parametrize("ranges", [True, False])
def test_verify_refuses_an_object_that_is_too_long(ranges: bool) -> None:
    store = memory()
    made = manifest(store, {"model.bin": DATA})
    pin = made.shards[0].pin
    version = store._versions[pin.key][0]
    assert version.info is not None
    info = msgspec.structs.replace(version.info, size=21)
    store._versions[pin.key][0] = msgspec.structs.replace(version, body=DATA + b"!", info=info)
    with pytest.raises(CorruptError, match=r"shard model\.bin"):
        verify(store, made, "bytes", ranges=ranges)


def test_verify_names_the_bad_shard_among_many() -> None:
    store = memory()
    made = manifest(store, {f"file-{number}": b"%d" % number for number in range(50)})
    _change(store, made.shards[33].pin.key, b"xx")
    with pytest.raises(CorruptError, match="shard file-33 "):
        verify(store, made, "bytes", workers=8)
