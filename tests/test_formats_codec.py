"""Golden bytes of everything in the bucket, and strict decoding.

A file in tests/golden changes only together with the format number: released readers must keep reading old bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CorruptError
from cachefs.formats.codec import decode, encode
from cachefs.formats.lease import Lease
from cachefs.formats.manifest import (
    Abandoned,
    Close,
    Directory,
    Loaded,
    Manifest,
    MemberReport,
    MemberTest,
    Open,
    Order,
    Pin,
    ReportPin,
    Shard,
    Symlink,
    Tracker,
    Wanted,
    tree_digest,
)
from cachefs.formats.manifest import TestEvidence as Evidence  # pytest would collect its own name
from cachefs.formats.pointer import OpenAttempt, Pointer, Prev, Published
from cachefs.formats.records import State

GOLDEN = Path(__file__).parent / "golden"
WHO = {"run": "team/llama", "generation": "step-1000", "attempt": "a" * 32}
BASE = "ckpt/runs/team/llama/attempts/" + "a" * 32
PARTS = (hashlib.sha256(b"one").hexdigest(), hashlib.sha256(b"two").hexdigest())
SHARDS = (
    Shard(
        paths=("model.safetensors", "same/file"),
        member="node-0",
        pin=Pin(
            key=f"{BASE}/shards/node-0/{'b' * 32}-model.safetensors",
            version_id="v1",
            size=8388609,
            sha256=tree_digest([bytes.fromhex(part) for part in PARTS]),
        ),
        part_size=8388608,
        parts=PARTS,
        mode=0o644,
        mtime_ns=1700000000123456789,
        xattrs={"user.note": b"\x00\xff"},
    ),
    Shard(
        paths=("caf%E9 é.json",),
        member="node-1",
        pin=Pin(
            key=f"{BASE}/shards/node-1/{'c' * 32}-caf%E9%20%C3%A9.json",
            version_id="null",
            size=0,
            sha256=hashlib.sha256(b"").hexdigest(),
        ),
        part_size=8388608,
        parts=(hashlib.sha256(b"").hexdigest(),),
        mode=0o600,
        mtime_ns=0,
    ),
)
EXTRAS = {
    "symlinks": (Symlink(path="latest", target="../step-1000"),),
    "directories": (Directory(path=".", mode=0o755, mtime_ns=1), Directory(path="same", mode=0o700, mtime_ns=2)),
    "trackers": (Tracker(path="latest", content=b"step-1000\n"), Tracker(path="link", content=b"x", symlink=True)),
}
REPORT_PIN = Pin(key=f"{BASE}/members/node-0.json", version_id="v2", size=10, sha256="d" * 64)
MANIFEST_PIN = Pin(key=f"{BASE}/manifest.json", version_id="v3", size=20, sha256="e" * 64)
ORDER = Order(step=1000, epoch=3, ordinal=7)

OBJECTS: dict[str, msgspec.Struct] = {
    "open": Open(
        **WHO, step=1000, epoch=3, ordinal=7, owner="node-0/1", members=("node-0", "node-1"), count=2,
        kind="directory", opened_at="2026-01-02T03:04:05Z",
    ),
    "close": Close(
        **WHO, member="node-0", preset="dcp", signal="rename .metadata", strength="A",
        closed_at="2026-01-02T03:04:06Z",
    ),
    "member": MemberReport(**WHO, member="node-0", host="host-0", writer="node-0/1", shards=SHARDS[:1], **EXTRAS),
    "member-least": MemberReport(**WHO, member="node-1", host="host-1", writer="node-1/9", shards=()),
    "manifest": Manifest(
        **WHO, kind="directory", order=ORDER, epoch=4, owner="node-1/9", preset="dcp",
        members=(ReportPin(member="node-0", pin=REPORT_PIN),), shards=SHARDS, sealed_at="2026-01-02T03:04:07Z",
        **EXTRAS,
    ),
    "test": Evidence(
        **WHO, manifest=MANIFEST_PIN, level="bytes", tested_by="node-1/9", epoch=4, shards=2, bytes=8388609,
        checks=("sha256", "safetensors"), tested_at="2026-01-02T03:04:08Z",
    ),
    "member-refused": MemberReport(
        **WHO, member="node-2", host="host-2", writer="node-2/1", shards=(), error="closed before this node began",
    ),
    "member-test": MemberTest(
        **WHO, manifest=MANIFEST_PIN, member="node-1", level="bytes", shards=1, bytes=7, error="",
        tested_at="2026-01-02T03:04:08Z",
    ),
    "test-load": Evidence(
        **WHO, manifest=MANIFEST_PIN, level="load", tested_by="node-0", epoch=3, shards=2, bytes=8388609,
        checks=("sha256",), tested_at="2026-01-02T03:04:08Z", testers=("node-0", "node-1"),
        loaded=Loaded(command=("python", "load.py"), user="nobody", status=0, output="ok\n", seconds=1.5),
    ),
    "abandoned": Abandoned(
        **WHO, epoch=3, owner="node-0/1", reason="node-2 has not reported", ended_at="2026-01-02T03:04:10Z",
    ),
    "wanted": Wanted(**WHO, member="node-1", kind="directory", step=1000),
    "lease": Lease(**WHO, holder="cachefs restore on node-7", created_at="2026-01-02T03:04:11Z"),
    "pointer-open": Pointer(
        run="team/llama", kind="open", seq=2, epoch=1, owner="node-0/1", nonce="e" * 32, at="2026-01-02T03:04:05Z",
        prev=Prev(etag='"abc"', version_id="v1", seq=1),
        open=(OpenAttempt(generation="step-1000", attempt="a" * 32),),
    ),
    "pointer-grant": Pointer(
        run="team/llama", kind="grant", seq=1, epoch=1, owner="node-0/1", nonce="f" * 32, at="2026-01-02T03:04:04Z",
    ),
    "pointer-rollback": Pointer(
        run="team/llama", kind="rollback", seq=9, epoch=4, owner="node-1/9", nonce="0" * 32, at="2026-01-02T03:04:09Z",
        published=Published(generation="step-1000", attempt="a" * 32, order=ORDER, manifest=MANIFEST_PIN),
        prev=Prev(etag='"abc"', version_id="v8", seq=8), rollback_of="1" * 32, retired=("2" * 32, "3" * 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_golden_bytes(name):
    stored = (GOLDEN / f"{name}.json").read_bytes()
    assert encode(OBJECTS[name]) == stored
    assert decode(stored, type(OBJECTS[name]), name) == OBJECTS[name]


def test_every_golden_file_is_tested():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(OBJECTS)


@pytest.mark.parametrize("name", ["open", "wanted"])
def test_a_field_that_older_readers_refuse_is_left_out_where_it_says_nothing(name):
    """However the object came about; and it is read where it stands all the same."""
    plain = OBJECTS[name]
    told = msgspec.structs.replace(plain, resumed=True)
    read = decode(changed(name, resumed=False), type(plain), name)
    for made in (
        plain,
        read,
        msgspec.structs.replace(plain, resumed=False),
        msgspec.structs.replace(told, resumed=False),
    ):
        assert "resumed" not in json.loads(encode(made))
        assert made == plain
        assert not made.resumed
    assert json.loads(encode(told))["resumed"] is True
    assert decode(encode(told), type(plain), name) == told != plain


@pytest.mark.parametrize("name", OBJECTS)
def test_the_encoding_is_canonical(name):
    """Keys are sorted at every level, nothing is spaced, and one line break ends it: equal values are equal bytes."""
    stored = encode(OBJECTS[name])
    canonical = json.dumps(json.loads(stored), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert stored.decode() == canonical + "\n"


def changed(name: str, **changes: object) -> bytes:
    return json.dumps(json.loads(encode(OBJECTS[name])) | changes).encode()


@pytest.mark.parametrize("name", OBJECTS)
def test_unknown_fields_versions_and_kinds_are_refused(name):
    kind, good = type(OBJECTS[name]), encode(OBJECTS[name])
    missing = {key: value for key, value in json.loads(good).items() if key != "run"}
    for bad in (
        changed(name, surprise=1),
        changed(name, format=2),
        changed(name, format="1"),
        changed(name, format=None),
        changed(name, run=7),
        json.dumps(missing).encode(),
        good[:-2],
        good + b"{}",
        b"",
        b"null",
        b"[]",
        good.replace(b"llama", b"ll\xffma"),
        b"\xef\xbb\xbf" + good,
    ):
        with pytest.raises(CorruptError, match=f"some/key is not a valid {kind.__name__}"):
            decode(bad, kind, "some/key")


def test_unknown_fields_deep_inside_are_refused():
    body = json.loads(encode(OBJECTS["manifest"]))
    body["shards"][1]["pin"]["etag"] = "x"
    with pytest.raises(CorruptError, match="unknown field `etag`"):
        decode(json.dumps(body).encode(), Manifest, "k")


@pytest.mark.parametrize(
    ("name", "changes"),
    [("test", {"level": "hope"}), ("open", {"kind": "block"}), ("pointer-grant", {"kind": "steal"})],
)
def test_unknown_words_are_refused(name, changes):
    with pytest.raises(CorruptError):
        decode(changed(name, **changes), type(OBJECTS[name]), "k")


@given(st.data())
def test_damaged_bytes_are_refused_or_read_but_never_raise_anything_else(data):
    name = data.draw(st.sampled_from(sorted(OBJECTS)))
    stored = bytearray(encode(OBJECTS[name]))
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    try:
        value = decode(bytes(stored), type(OBJECTS[name]), "k")
    except CorruptError:
        return
    assert decode(encode(value), type(value), "k") == value


def test_garbage_that_nests_deeply_is_refused():
    with pytest.raises(CorruptError):
        decode(b'{"shards":' + b"[" * 100_000, Manifest, "k")
    with pytest.raises(CorruptError):
        decode(b'{"zzz":' + b"[" * 100_000, Manifest, "k")


def test_tree_digest_is_the_composite_of_s3():
    one, two = (hashlib.sha256(text).digest() for text in (b"one", b"two"))
    assert tree_digest([one]) == one.hex()
    assert tree_digest([one, two]) == hashlib.sha256(one + two).hexdigest()


def test_a_reports_content_leaves_out_who_wrote_it_and_nothing_else():
    report = OBJECTS["member"]
    assert isinstance(report, MemberReport)
    again = msgspec.structs.replace(report, host="other", writer="other")
    assert again.content() == report.content()
    for field in set(report.__struct_fields__) - {"host", "writer", "format"}:
        assert msgspec.structs.replace(report, **{field: "changed"}).content() != report.content(), field


def test_a_manifests_size_is_the_bytes_of_its_shards():
    manifest = OBJECTS["manifest"]
    assert isinstance(manifest, Manifest)
    assert manifest.size == 8388609


def test_states_rank_in_the_order_of_the_promises():
    way = [State.OPEN, State.STAGED, State.FLUSHED, State.SEALED, State.TESTED, State.PUBLISHED]
    assert sorted(State, key=lambda state: state.rank)[-6:] == way
    assert [state for state in State if state.final] == [State.PUBLISHED, State.ABANDONED]
    assert State.FENCED.rank < State.OPEN.rank
    assert State.ABANDONED.rank < State.OPEN.rank
