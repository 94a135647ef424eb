"""Reports and manifests are built from exactly what was flushed and declared."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CorruptError
from cachefs.formats.codec import encode
from cachefs.formats.manifest import Directory, MemberReport, Open, Pin, Symlink, Tracker
from cachefs.formats.records import AttemptRecord, Identity, ShardRecord, State
from cachefs.publish import sealing

ATTEMPT = AttemptRecord(
    attempt="t",
    path="r/g",
    run="r",
    generation="g",
    kind="directory",
    preset="auto",
    step=7,
    opened_at=0.0,
    serial=1,
    state=State.FLUSHED,
    closed_at=60.0,
)
OPEN = sealing.opening(
    ATTEMPT, epoch=3, ordinal=2, owner="n1/x", members=["n2", "n1"], count=2, again=False, resumed=False
)


def shard(path: str, data: bytes = b"data", **fields: Any) -> ShardRecord:
    digest = hashlib.sha256(data)
    record = ShardRecord(
        attempt="t",
        shard=path,
        paths=(path,),
        identity=Identity(ino=1, size=len(data), mtime_ns=5),
        mode=0o600,
        key=f"k/{path}",
        part_size=8,
        digests=(digest.digest(),),
        pin=Pin(f"k/{path}", "v1", len(data), digest.hexdigest()),
    )
    return msgspec.structs.replace(record, **fields)


def report(member: str, *paths: str, attempt: AttemptRecord = ATTEMPT) -> tuple[MemberReport, Pin]:
    shards = [shard(path, pin=pin(path, member)) for path in paths]
    made = sealing.report(attempt, shards, member=member, host="h", writer="w")
    return made, Pin(f"members/{member}", "v", 1, "d")


def pin(path: str, member: str, data: bytes = b"data") -> Pin:
    return Pin(f"{place(member)}{path}", "v1", len(data), hashlib.sha256(data).hexdigest())


def place(member: str) -> str:
    return f"attempts/t/shards/{member}/"


def seal(*reports: tuple[MemberReport, Pin], opened: Open = OPEN) -> Any:
    closed = sealing.closing(ATTEMPT, "n1")
    return sealing.manifest(opened, closed, reports, place=place, epoch=4, owner="n1/y", sealed_at="now")


@given(st.permutations(["a", "b", "c/d"]))
def test_equal_records_give_equal_bytes(paths: list[str]) -> None:
    made, _ = report("n1", *paths)
    assert encode(made) == encode(report("n1", "a", "b", "c/d")[0])


@given(st.permutations([("n1", "a"), ("n2", "b")]))
def test_the_manifest_does_not_depend_on_the_order_of_reports(order: list[tuple[str, str]]) -> None:
    manifest = seal(*(report(member, path) for member, path in order))
    assert [entry.member for entry in manifest.members] == ["n1", "n2"]
    assert [entry.paths[0] for entry in manifest.shards] == ["a", "b"]
    assert (manifest.order.step, manifest.order.epoch, manifest.order.ordinal, manifest.epoch) == (7, 3, 2, 4)


@pytest.mark.parametrize("members", [["n1"], ["n1", "n2", "n3"], ["n1", "n1", "n2"], ["n1", "n1"], []])
def test_the_set_of_members_is_exact(members: list[str]) -> None:
    """I16."""
    with pytest.raises(CorruptError, match="expected exactly"):
        seal(*(report(member, f"{member}-{number}") for number, member in enumerate(members)))


COUNTED = msgspec.structs.replace(OPEN, members=(), count=2)


@pytest.mark.parametrize("members", [["n1"], ["n1", "n2", "n3"], ["n1", "n1"], []])
def test_the_number_of_members_is_exact_where_their_names_are_not_known(members: list[str]) -> None:
    with pytest.raises(CorruptError, match="expected 2 different ones"):
        seal(*(report(member, f"{member}-{n}") for n, member in enumerate(members)), opened=COUNTED)
    assert len(seal(report("any", "a"), report("other", "b"), opened=COUNTED).shards) == 2


def test_a_file_that_every_member_writes_is_taken_once() -> None:
    manifest = seal(report("n2", "config.json", "b"), report("n1", "config.json", "a"))
    assert [(entry.paths[0], entry.member) for entry in manifest.shards] == [
        ("a", "n1"), ("b", "n2"), ("config.json", "n1"),
    ]  # fmt: skip


def test_members_with_different_bytes_in_one_path() -> None:
    other = hashlib.sha256(b"else")
    made = sealing.report(
        ATTEMPT,
        [shard("same", digests=(other.digest(),), pin=Pin(f"{place('n2')}same", "v1", 4, other.hexdigest()))],
        member="n2",
        host="",
        writer="",
    )
    with pytest.raises(CorruptError, match="members n1 and n2 have different bytes in same"):
        seal(report("n1", "same"), (made, Pin("members/n2", "v", 1, "d")))


def test_two_members_with_one_path_as_file_and_directory() -> None:
    with pytest.raises(CorruptError, match="same"):
        seal(report("n1", "same"), report("n2", "same/file"))


def test_a_member_that_cannot_take_part() -> None:
    made, at = report("n2")
    refused = msgspec.structs.replace(made, error="its disk is gone")
    with pytest.raises(CorruptError, match="member n2 cannot take part: its disk is gone"):
        seal(report("n1", "a"), (refused, at))


def test_the_bytes_of_another_attempt_are_refused() -> None:
    """Its report names our attempt, its shards lie in another one."""
    stray = shard("b", pin=Pin("attempts/u/shards/n2/b", "v1", 4, hashlib.sha256(b"data").hexdigest()))
    made = sealing.report(ATTEMPT, [stray], member="n2", host="", writer="")
    with pytest.raises(CorruptError, match="members/n2 reports b with the bytes of another attempt"):
        seal(report("n1", "a"), (made, Pin("members/n2", "v", 1, "d")))


def test_trackers_are_those_of_the_member_that_closed() -> None:
    first, second = (
        msgspec.structs.replace(ATTEMPT, trackers=(Tracker("latest", content),)) for content in (b"5", b"7")
    )
    manifest = seal(report("n1", "a", attempt=second), report("n2", "b", attempt=first))
    assert manifest.trackers == (Tracker("latest", b"7"),)


def test_a_report_of_another_save() -> None:
    other = msgspec.structs.replace(ATTEMPT, attempt="u")
    with pytest.raises(CorruptError, match="another save"):
        seal(report("n1", "a"), report("n2", "b", attempt=other))


def test_shared_directories_and_links_are_listed_once() -> None:
    fields = {"symlinks": (Symlink("link", "a"),), "directories": (Directory(".", 0o755, 1),)}
    first = msgspec.structs.replace(ATTEMPT, **fields)
    second = msgspec.structs.replace(first, directories=(Directory(".", 0o755, 2),))
    manifest = seal(report("n1", "a", attempt=first), report("n2", "b", attempt=second))
    assert manifest.symlinks == (Symlink("link", "a"),)
    assert manifest.directories == (Directory(".", 0o755, 2),)


def test_members_that_disagree_about_a_link() -> None:
    first = msgspec.structs.replace(ATTEMPT, symlinks=(Symlink("link", "a"),))
    second = msgspec.structs.replace(ATTEMPT, symlinks=(Symlink("link", "b"),))
    with pytest.raises(CorruptError, match="'link' is twice"):
        seal(report("n1", "a", attempt=first), report("n2", "b", attempt=second))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pin": None}, "not flushed"),
        ({"digests": ()}, "not flushed"),
        ({"identity": Identity(ino=1, size=5, mtime_ns=5)}, "other bytes"),
        ({"digests": (b"\0" * 32,)}, "other bytes"),
    ],
)
def test_a_shard_must_be_what_was_staged(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptError, match=reason):
        sealing.report(ATTEMPT, [shard("a", **fields)], member="n1", host="", writer="")


def test_repeating_a_step_finds_the_same_object() -> None:
    manifest = seal(report("n1", "a"), report("n2", "b"))
    assert sealing.same_manifest(msgspec.structs.replace(manifest, sealed_at="earlier"), manifest)
    assert not sealing.same_manifest(msgspec.structs.replace(manifest, owner="n9"), manifest)
    made, _ = report("n1", "a")
    assert sealing.same_report(msgspec.structs.replace(made, host="other", writer="other"), made)
    assert not sealing.same_report(report("n1", "b")[0], made)
    earlier = msgspec.structs.replace(OPEN, epoch=2, ordinal=9, owner="n1/before")
    assert sealing.same_open(earlier, OPEN)
    assert not sealing.same_open(msgspec.structs.replace(OPEN, epoch=4), OPEN)
    assert not sealing.same_open(msgspec.structs.replace(OPEN, members=("n1",)), OPEN)
