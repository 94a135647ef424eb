"""Whole publications, with faults in the store and bad candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from cachefs.errors import CorruptError
from cachefs.formats.codec import decode, encode
from cachefs.formats.manifest import Close, Manifest, MemberReport, Open
from cachefs.formats.manifest import TestEvidence as Evidence
from cachefs.formats.pointer import Pointer, Published
from cachefs.formats.records import AttemptRecord, State
from cachefs.publish.rules import effective_state
from cachefs.publish.sealing import OpenSource
from cachefs.restore.files import restore
from cachefs.restore.listing import runs
from cachefs.restore.reader import find, load_manifest, read_pointer
from cachefs.restore.verify import verify
from cachefs.store.base import CREATE_ONLY, Condition
from cachefs.store.directory import DirectoryStore
from tests.conftest import DeclaredWarnings
from tests.publish.stage import FILES, RUN, TREE, Member, memory
from tests.store.faults import (
    FaultyStore,
    Held,
    Rule,
    conflict,
    corrupted,
    denied,
    ends,
    lost_answer,
    lost_request,
    precondition_failed,
    rules,
    throttled,
)

Members = Callable[..., Member]
WRITES = ("open.json", "close.json", "n1.json", "manifest.json", "test.json", "pointer.json")


def read(member: Member, key: str, kind: Any) -> Any:
    found = member.inner.get(key)
    assert found is not None
    return decode(found[1], kind, key)


async def test_publishes_a_generation(members: Members) -> None:
    member = members()
    attempt = member.save("step-1", 1, **TREE)
    assert not await member.publish()
    record = member.attempt(attempt)
    assert (record.state, record.error, record.opened_epoch, record.ordinal) == (State.PUBLISHED, "", 1, 1)
    manifest = member.manifest()
    assert [shard.paths for shard in manifest.shards] == [("model.bin",), ("sub/empty",), ("sub/small",)]
    assert (manifest.symlinks, manifest.directories, manifest.trackers) == tuple(TREE.values())
    assert verify(member.store, manifest, "bytes").bytes == sum(map(len, FILES.values()))
    assert member.shards(attempt) == []
    assert member.pins.shards(attempt) == set()


async def test_every_object_says_what_it_should(members: Members) -> None:
    member = members()
    attempt = member.save("step-1", 1)
    await member.publish()
    keys = member.keys
    opened = read(member, keys.open(RUN, attempt), Open)
    assert (opened.members, opened.epoch, opened.ordinal, opened.opened_at) == (("n1",), 1, 1, "1970-01-01T00:16:41Z")
    assert read(member, keys.close(RUN, attempt), Close).signal == "marker"
    assert len(read(member, keys.member(RUN, attempt, "n1"), MemberReport).shards) == 3
    evidence = read(member, keys.test(RUN, attempt, opened=1, sealed=1), Evidence)
    assert (evidence.level, evidence.shards, evidence.bytes) == ("bytes", 3, 21)
    assert evidence.manifest == member.attempt(attempt).manifest
    pointer = read(member, keys.pointer(RUN), Pointer)
    assert (pointer.kind, pointer.seq, pointer.epoch) == ("promote", 3, 1)
    versions = [entry.key for entry in member.inner.list_versions(keys.attempt(RUN, attempt))]
    assert len(versions) == len(set(versions)) == 8


async def test_publishes_to_a_directory_and_restores_from_it(members: Members, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = DirectoryStore(str(tmp_path / "store"))
    member = members(store)
    member.save("step-1", 1, **TREE)
    member.save("step-2", 2)
    await member.publish()
    assert [run.name for run in runs(store, member.keys)] == [RUN]
    for generation in ("step-1", None):
        published = find(store, member.keys, RUN, generation)
        restored = restore(store, load_manifest(store, RUN, published), tmp_path / "out")
        assert (restored.path / "model.bin").read_bytes() == FILES["model.bin"]
    assert (tmp_path / "out/latest").read_bytes() == b"step-1\n"
    assert (tmp_path / "out/step-1/link").readlink() == Path("model.bin")


async def test_every_write_is_conditional_and_nothing_is_deleted(members: Members) -> None:
    """I2 and I15."""
    store = FaultyStore(memory())
    member = members(store)
    member.save("step-1", 1)
    await member.publish()
    writes = [call for call in store.calls if call.operation == "put"]
    assert len(writes) == 8
    assert all(call.condition is not None for call in writes)
    assert all(call.condition == CREATE_ONLY for call in writes if not call.key.endswith("pointer.json"))
    assert not [call for call in store.calls if "delete" in call.operation]


async def test_publishes_in_the_order_of_the_saves(members: Members) -> None:
    member = members()
    for step in (1, 2, 3):
        member.save(f"step-{step}", step)
    await member.publish()
    assert member.generations() == ["step-1", "step-2", "step-3"]


async def test_a_closed_save_waits_for_the_one_before_it(members: Members) -> None:
    member = members()
    member.flushes = False
    first = member.save("step-1", 1)
    second = member.save("step-2", 2)

    def opened() -> bool:
        if member.attempt(second).opened_epoch is None:
            return False
        if member.attempt(second).state is State.STAGED:
            member.flush(second)
        return True

    await member.publish(until=opened)
    assert member.generations() == []
    member.flush(first)
    await member.publish()
    assert member.generations() == ["step-1", "step-2"]


async def test_a_save_that_is_still_written_holds_nothing_back(members: Members) -> None:
    member = members()
    writing = member.save("step-1", 1, state=State.OPEN)
    later = member.save("step-2", 2)
    await member.publish(until=lambda: member.attempt(later).state is State.PUBLISHED)
    assert member.attempt(writing).state is State.OPEN
    assert member.attempt(writing).ordinal == 1
    assert member.attempt(later).ordinal == 2


async def test_saving_a_step_again_publishes_it_again(members: Members) -> None:
    """I13: the order is step, epoch, ordinal, so a second save of one step is later than the first."""
    member = members()
    member.save("step-1", 1)
    second = member.save("step-1", 1, {"model.bin": b"better"})
    await member.publish()
    assert member.generations() == ["step-1", "step-1"]
    assert member.manifest().attempt == second


async def test_an_older_step_is_abandoned(members: Members, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("generation abandoned")
    member = members()
    member.save("step-200", 200)
    older = member.save("step-100", 100)
    await member.publish()
    record = member.attempt(older)
    assert record.state is State.ABANDONED
    assert "step 100 is not newer than the published step 200 (step-200)" in record.error
    assert member.generations() == ["step-200"]
    assert member.pins.shards(older) == set()


async def test_a_retired_attempt_is_abandoned(members: Members, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("generation abandoned")
    member = members()
    attempt = member.save("step-1", 1)

    def retire(record: AttemptRecord) -> bool:
        if record.state is not State.TESTED:
            return False
        seen = read_pointer(member.inner, member.keys, RUN)
        assert seen is not None
        retired = msgspec.structs.replace(
            seen.pointer, kind="retire", seq=seen.pointer.seq + 1, nonce="gc", prev=seen.prev, retired=(attempt,)
        )
        key = member.keys.pointer(RUN)
        member.inner.put(key, encode(retired), condition=Condition(if_match=seen.etag))
        return True

    await member.publish(until=lambda: retire(member.attempt(attempt)))
    await member.publish()
    assert "retired" in member.attempt(attempt).error


async def test_runs_are_independent(members: Members, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("publication waits")
    store = FaultyStore(memory(), rules(Rule("*", denied, key=lambda key: "bad" in key, nth=0)))
    member = members(store)
    stuck = member.save("step-1", 1, run="bad")
    fine = member.save("step-1", 1, run="good")
    await member.publish(
        until=lambda: member.attempt(fine).state is State.PUBLISHED and bool(member.attempt(stuck).error)
    )
    assert "AccessDenied" in member.attempt(stuck).error
    assert member.attempt(stuck).retries > 0


async def test_without_publish_attempts_are_only_opened(members: Members) -> None:
    member = members()
    attempt = member.save("step-1", 1)
    await member.publish(until=lambda: member.attempt(attempt).state is State.FLUSHED, publish=False)
    assert member.generations() == []


# unclear writes


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "fault", [lost_answer, lost_request, throttled, precondition_failed, conflict], ids=lambda fault: fault.__name__
)
async def test_an_unclear_write_is_resolved(
    members: Members, declared_warnings: DeclaredWarnings, write: str, fault: Any
) -> None:
    declared_warnings("publication waits", optional=True)
    for nth in (1, 2, 3) if write == "pointer.json" else (1,):
        store = FaultyStore(memory(), rules(Rule("put", fault, key=ends(write), nth=nth)))
        member = members(store, name=f"n1-{nth}") if nth > 1 else members(store)
        attempt = member.save("step-1", 1)
        await member.publish()
        assert member.attempt(attempt).state is State.PUBLISHED
        assert member.attempt(attempt).error == ""
        versions = [entry.key for entry in store.inner.list_versions(member.keys.attempts(RUN))]
        assert len(versions) == len(set(versions)), "a create-only key was written twice"
        assert len(list(store.inner.list_versions(member.keys.pointer(RUN)))) == 3


async def test_a_pointer_read_from_before_the_announcement_ends_nothing(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    """Race 14: a lagging replica does not list the attempt yet, which is not to say that it was taken off the list."""
    declared_warnings("publication waits")
    store = FaultyStore(memory())
    member = members(store)
    attempt = member.save("step-1", 1)
    key = member.keys.pointer(RUN)

    def before(request: Callable[[], Any]) -> Any:
        if member.attempt(attempt).error:
            return request()
        grant = list(store.inner.list_versions(key))[-1]
        return store.inner.get(key, grant.version_id)

    def tested(request: Callable[[], Any]) -> Any:
        store.plan = rules(Rule("get", before, key=ends("pointer.json"), nth=0))
        return request()

    store.plan = rules(Rule("put", tested, key=ends("test.json")))
    await member.publish()
    assert member.attempt(attempt).state is State.PUBLISHED
    assert member.generations() == ["step-1"]


@pytest.mark.parametrize("write", WRITES)
async def test_a_delayed_duplicate_changes_nothing(members: Members, write: str) -> None:
    held = Held(duplicate=True)
    store = FaultyStore(memory(), rules(Rule("put", held, key=ends(write))))
    member = members(store)
    member.save("step-1", 1)
    await member.publish()
    before = list(store.inner.list_versions(""))
    with pytest.raises(Exception, match="precondition"):
        held.release()
    assert list(store.inner.list_versions("")) == before


async def test_an_outage_of_the_store_is_waited_for_and_shown(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    """Race 28."""
    declared_warnings("publication waits")
    store = FaultyStore(memory(), rules(Rule("*", throttled, nth=0)))
    member = members(store)
    attempt = member.save("step-1", 1)
    await member.publish(until=lambda: member.attempt(attempt).retries >= 5)
    assert "SlowDown" in member.attempt(attempt).error
    store.plan = rules()
    await member.publish()
    assert member.attempt(attempt).state is State.PUBLISHED
    assert member.attempt(attempt).error == ""


@pytest.mark.parametrize("when", ["reported", "sealed"])
async def test_a_store_that_is_not_there_for_a_while_condemns_nothing(
    members: Members, declared_warnings: DeclaredWarnings, tmp_path: Path, when: str
) -> None:
    """Its directory is not mounted: that an object cannot be found then does not mean that it is gone."""
    declared_warnings("publication waits")
    declared_warnings("a run does not move", optional=True)
    root, away = tmp_path / "store", tmp_path / "away"
    root.mkdir()
    member = members(DirectoryStore(str(root)))
    attempt = member.save("step-1", 1)

    def outage() -> bool:
        record = member.attempt(attempt)
        reached = record.report is not None if when == "reported" else record.state is State.SEALED
        if reached and root.exists() and not record.retries:
            root.rename(away)
        return record.retries >= 2 or record.state.final

    await member.publish(until=outage)
    assert member.attempt(attempt).state is not State.ABANDONED, member.attempt(attempt).error
    away.rename(root)
    await member.publish()
    assert member.attempt(attempt).state is State.PUBLISHED


# candidates that must not be published


def _flip(store: Any, key: str, body: bytes) -> None:
    """Change stored bytes behind the store's back, as a failing disk would."""
    versions = store._versions[key]
    store._versions[key] = [msgspec.structs.replace(version, body=body) for version in versions]


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
@pytest.mark.parametrize("ranges", [True, False])
async def test_the_restore_test_refuses_damage(
    members: Members, declared_warnings: DeclaredWarnings, damage: str, ranges: bool
) -> None:
    """I5: one flipped byte, a part missing with a truthful size, a version gone."""
    declared_warnings("generation abandoned")
    member = members()
    good = member.save("step-1", 1)
    await member.publish()
    bad = member.save("step-2", 2)

    def hurt() -> bool:
        if member.attempt(bad).state is State.SEALED:
            key = next(shard.key for shard in member.shards(bad) if shard.paths == ("model.bin",))
            found = member.inner.get(key)
            assert found is not None
            info, body = found
            if damage == "gone":
                member.inner.delete_version(key, info.version_id)
            else:
                _flip(member.inner, key, body[:-1] + b"?" if damage == "flipped" else body[:-8])
        return member.idle()

    await member.publish(until=hurt, ranges=ranges)
    record = member.attempt(bad)
    assert record.state is State.ABANDONED
    assert "model.bin" in record.error
    assert "kept until a later save" in record.error
    assert member.generations() == ["step-1"]
    assert len(member.pins.shards(bad)) == 3, "the local bytes are all there is"
    member.save("step-3", 3)
    await member.publish()
    assert member.generations() == ["step-1", "step-3"]
    assert member.pins.shards(bad) == set()
    assert member.attempt(good).state is State.PUBLISHED


@pytest.mark.parametrize("level", ["bytes", "checksum"])
async def test_lost_bytes_in_a_directory_do_not_hold_the_run_up(
    members: Members, declared_warnings: DeclaredWarnings, tmp_path: Path, level: str
) -> None:
    """The version's record is there, its bytes are not: that will not pass, as a missing file system may."""
    declared_warnings("generation abandoned")
    root = tmp_path / "store"
    root.mkdir()
    member = members(DirectoryStore(str(root)))
    bad = member.save("step-1", 1)

    def lose() -> bool:
        record = member.attempt(bad)
        if record.state is State.SEALED:
            for shard in member.shards(bad):
                assert shard.pin is not None
                for path in root.rglob(shard.pin.version_id):
                    path.unlink()
        return member.idle() or record.retries > 0

    await member.publish(until=lose, level=level)
    record = member.attempt(bad)
    assert record.state is State.ABANDONED, record.error
    assert "has lost its bytes" in record.error
    member.save("step-2", 2)
    await member.publish()
    assert member.generations() == ["step-2"]


async def test_level_checksum_reads_no_bytes_where_the_store_keeps_digests(members: Members) -> None:
    store = FaultyStore(memory())
    member = members(store)
    attempt = member.save("step-1", 1, {"a": b"one part"})
    member.journal.write_now(lambda txn: None)
    await member.publish(level="checksum")
    assert member.attempt(attempt).state is State.PUBLISHED


async def test_formats_are_checked_before_sealing_and_in_the_store(members: Members) -> None:
    member = members()
    member.save("step-1", 1)
    seen: list[dict[str, bytes]] = []

    def check(manifest: Manifest, open_source: OpenSource) -> Sequence[str]:
        seen.append({shard.paths[0]: open_source(shard).read(0, 100) for shard in manifest.shards})
        return ["format"]

    await member.publish(completeness=check)
    assert seen == [FILES, FILES]
    attempt = member.manifest().attempt
    assert read(member, member.keys.test(RUN, attempt, opened=1, sealed=1), Evidence).checks == ("format",)


async def test_a_torn_file_is_not_sealed(members: Members, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("generation abandoned")
    member = members()
    attempt = member.save("step-1", 1)

    def torn(manifest: Manifest, open_source: OpenSource) -> Sequence[str]:
        raise CorruptError("model.bin: no zip end record")

    await member.publish(completeness=torn)
    assert "model.bin: no zip end record" in member.attempt(attempt).error
    assert member.inner.head(member.keys.manifest(RUN, attempt, opened=1, sealed=1)) is None


async def test_other_bytes_under_our_key_kill_the_attempt(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    """Race 26, and I16: a second report with other bytes."""
    declared_warnings("generation abandoned")
    member = members()
    attempt = member.save("step-1", 1)
    strange = MemberReport(run=RUN, generation="step-1", attempt=attempt, member="n1", host="", writer="", shards=())
    member.inner.put(member.keys.member(RUN, attempt, "n1"), encode(strange), condition=CREATE_ONLY)
    await member.publish()
    assert member.attempt(attempt).state is State.ABANDONED
    assert "other bytes" in member.attempt(attempt).error


async def test_a_store_that_ignores_conditions_stops_publication(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    """Race 40: the manifest's key has two versions."""
    declared_warnings("publication waits")
    inner = memory()

    def twice(request: Callable[[], Any]) -> Any:
        result = request()
        inner.put(result.key, b"other", condition=None)
        return result

    store = FaultyStore(inner, rules(Rule("put", twice, key=ends("manifest.json"))))
    member = members(store)
    attempt = member.save("step-1", 1)
    await member.publish(until=lambda: bool(member.attempt(attempt).error))
    assert "2 versions" in member.attempt(attempt).error
    assert member.attempt(attempt).state is State.FLUSHED
    assert member.generations() == []


async def test_suspended_versioning_stops_publication(members: Members, declared_warnings: DeclaredWarnings) -> None:
    """Race 39."""
    declared_warnings("publication waits")

    def unversioned(request: Callable[[], Any]) -> Any:
        return msgspec.structs.replace(request(), version_id="null")

    member = members(FaultyStore(memory(), rules(Rule("put", unversioned, key=ends("manifest.json")))))
    attempt = member.save("step-1", 1)
    await member.publish(until=lambda: bool(member.attempt(attempt).error))
    assert "versioning of the bucket is suspended" in member.attempt(attempt).error
    assert member.generations() == []


async def test_a_damaged_read_of_the_manifest_is_noticed(members: Members, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("generation abandoned")
    member = members(FaultyStore(memory(), rules(Rule("get", corrupted, key=ends("manifest.json")))))
    attempt = member.save("step-1", 1)
    await member.publish()
    assert "does not have the bytes that were pinned" in member.attempt(attempt).error


# decisions of others meanwhile


@pytest.mark.parametrize(("write", "state"), [("test.json", State.ABANDONED), ("pointer.json", State.PUBLISHED)])
async def test_abandoned_by_another_part_meanwhile(members: Members, write: str, state: State) -> None:
    """Before the promotion that stops the attempt; once the pointer names it, it is published, whatever was wished."""
    store = FaultyStore(memory())
    member = members(store)
    attempt = member.save("step-1", 1)

    def abandon(request: Callable[[], Any]) -> Any:
        member.journal.write_now(lambda txn: txn.update_attempt(attempt, state=State.ABANDONED, error="by hand"))
        return request()

    store.plan = rules(Rule("put", abandon, key=ends(write), nth=3 if write == "pointer.json" else 1))
    await member.publish()
    assert member.attempt(attempt).state is state
    assert member.generations() == (["step-1"] if state is State.PUBLISHED else [])


# cancelling


async def test_cancelling_and_going_on(members: Members) -> None:
    """Each state is left once by a stop; the next process adopts the attempt under its own epoch."""
    member = members()
    attempt = member.save("step-1", 1)
    for state in (State.FLUSHED, State.SEALED, State.TESTED):
        await member.publish(until=partial(_is, member, attempt, state))
        assert member.attempt(attempt).state is state
        member = member.restart()
    await member.publish()
    manifest = member.manifest()
    assert (manifest.epoch, manifest.order.epoch, manifest.order.ordinal) == (4, 1, 1)
    assert manifest_key(member.attempt(attempt)).endswith("manifest-4.json")
    member.close()


def _is(member: Member, attempt: str, state: State) -> bool:
    return member.attempt(attempt).state is state


def manifest_key(record: AttemptRecord) -> str:
    assert record.manifest is not None
    return record.manifest.key


async def test_a_fenced_attempt_shows_as_fenced(members: Members) -> None:
    member = members()
    attempt = member.save("step-1", 1)
    await member.publish(until=lambda: member.attempt(attempt).state is State.SEALED)
    with member.journal.read() as txn:
        run = txn.runs.get(RUN)
    assert run is not None
    fenced = msgspec.structs.replace(run, fenced_by="n2/x (epoch 2)")
    assert effective_state(member.attempt(attempt), run) is State.SEALED
    assert effective_state(member.attempt(attempt), fenced) is State.FENCED
    await member.publish()
    assert effective_state(member.attempt(attempt), fenced) is State.PUBLISHED
    assert isinstance(read_pointer(member.inner, member.keys, RUN).pointer.published, Published)  # type: ignore[union-attr]


async def test_nothing_to_do_costs_no_request(members: Members) -> None:
    store = FaultyStore(memory())
    member = members(store)
    publisher = member.publisher()
    with trio.move_on_after(100):
        await publisher.run()
    assert store.calls == []
