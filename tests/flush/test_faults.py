"""Every bad answer a store can give, and a kill after every effect: one version of each file, nothing sent in vain."""

from __future__ import annotations

import hashlib
import os
import threading

import msgspec
import pytest
import trio

from cachefs.errors import BadPart, ConditionConflict, DeniedError, NoStoreError, StagingError, UnavailableError
from cachefs.formats.records import RunRecord, State
from tests.flush.world import MEMBER, PART, World, content
from tests.store.faults import (
    Call,
    FaultyStore,
    Rule,
    conflict,
    lost_answer,
    lost_request,
    precondition_failed,
    refused,
    rules,
    throttled,
)

FILES = {"small": content(7), "empty": b"", "large": content(4 * PART + 3), "whole": content(PART)}


EFFECTS = 3 + (1 + 5 + 1)
"""Effects of flushing FILES: three puts; create, five parts, complete."""


@pytest.mark.parametrize("effect", range(1, EFFECTS + 1))
async def test_a_kill_after_every_effect(autojump_clock, world: World, effect: int):
    world.save("a", FILES)
    world.store.crash_after = effect
    assert await world.crashes()
    with world.journal.read() as txn:
        known = len(txn.parts_of(world.shard("a", "large")))
        begun = world.shard("a", "large").upload_id
    world.restart()
    await world.drained()
    world.check("a")
    assert world.count("upload_part") <= 5 - known
    assert world.count("create_multipart") <= (0 if begun else 1)


async def test_a_kill_late_in_a_large_upload_sends_only_the_rest(autojump_clock, world: World):
    world.save("a", {"f": content(10 * PART)})
    world.store.crash_after = 1 + 8
    assert await world.crashes()
    with world.journal.read() as txn:
        known = len(txn.parts_of(world.shard("a", "f")))
    assert known >= 4
    world.restart()
    await world.drained()
    world.check("a")
    assert world.count("create_multipart") == 0
    assert world.count("upload_part") == 10 - known
    assert world.flusher.statistics().orphans_aborted == 0


async def test_a_kill_after_complete_is_found_by_the_next_start(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)})
    world.store.crash_after = 5
    assert await world.crashes()
    world.restart()
    await world.drained()
    world.check("a")
    assert world.count("upload_part") == 0


async def test_a_part_that_changed_in_the_store_goes_again(autojump_clock, world: World):
    world.save("a", {"f": content(4 * PART)})
    world.store.plan = rules(Rule("complete_multipart", refused(RuntimeError("stop")), nth=0))
    with pytest.raises(BaseExceptionGroup):
        await world.drained()
    upload = world.memory.list_multiparts("")[0]
    body = content(PART, 1)
    world.memory.upload_part(upload.key, upload.upload_id, 2, body, sha256=hashlib.sha256(body).digest())
    world.restart()
    await world.drained()
    world.check("a")
    assert world.count("upload_part") == 1
    assert world.count("list_parts") == 1


ANSWERS = {
    "lost answer": lost_answer,
    "lost request": lost_request,
    "409": conflict,
    "412": precondition_failed,
    "5xx": refused(UnavailableError("500", reason="5xx")),
    "not xml": refused(UnavailableError("body is not XML", reason="malformed")),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("operation", ["put", "complete_multipart"])
@pytest.mark.parametrize("heads_fail", [False, True])
async def test_unclear_answers_to_create_only_writes(
    autojump_clock, world: World, operation: str, answer: str, heads_fail: bool
):
    world.save("a", FILES)
    faults = [Rule(operation, ANSWERS[answer])]
    if heads_fail:
        faults.append(Rule("head", throttled))
    world.store.plan = rules(*faults)
    await world.drained()
    world.check("a")


@pytest.mark.parametrize("fault", [lost_answer, lost_request, throttled, ANSWERS["5xx"], ANSWERS["not xml"]])
@pytest.mark.parametrize("operation", ["create_multipart", "upload_part", "list_parts", "abort_multipart"])
async def test_requests_that_fail_once(autojump_clock, world: World, operation: str, fault):
    world.save("a", FILES)
    bad_part = Rule("complete_multipart", refused(BadPart("InvalidPart")))
    gone = Rule("complete_multipart", refused(ConditionConflict("409")))
    world.store.plan = rules(
        Rule(operation, fault), *{"list_parts": [bad_part], "abort_multipart": [gone]}.get(operation, [])
    )
    await world.drained()
    if operation == "create_multipart" and fault is lost_answer:
        assert len(world.memory.list_multiparts("")) == 1  # nobody was told its id: the next start aborts it
        world.restart()
        async with world.running():
            await world.until(lambda: world.flusher.statistics().orphans_aborted == 1)
    world.check("a")


async def test_failures_are_counted_by_reason_and_shown_until_it_works(autojump_clock, world: World):
    world.save("a", {"f": content(PART)})
    faults = [Rule("put", ANSWERS[answer], nth=n) for n, answer in enumerate(["5xx", "not xml", "lost request"], 1)]
    faults.append(Rule("put", throttled, nth=0))
    world.store.plan = rules(*faults)
    async with world.running():
        await world.until(lambda: world.shard("a", "f").retries >= 6)
        assert "SlowDown" in world.shard("a", "f").error
        assert world.attempt("a").state is State.STAGED
        assert world.flusher.pending() == (1, PART)
        world.store.plan = rules()
        await world.flusher.drain()
    world.check("a")
    failures = world.flusher.statistics().failures
    assert (failures["5xx"], failures["malformed"], failures["timeout"]) == (1, 1, 1)
    assert failures["throttled"] >= 3
    assert world.shard("a", "f").retries == sum(failures.values())


async def test_bad_digests_are_read_and_sent_again_then_reported(autojump_clock, world: World):
    world.save("a", {"small": content(5), "large": content(3 * PART)})
    world.store.plan = rules(
        Rule("put", refused(BadPart("BadDigest"))), Rule("upload_part", refused(BadPart("BadDigest")), nth=2)
    )
    await world.drained()
    world.check("a")
    assert world.count("upload_part") == 4
    world.save("b", {"small": content(5)})
    world.store.plan = rules(Rule("put", refused(BadPart("BadDigest")), nth=0))
    async with world.running():
        await world.until(lambda: "BadDigest" in world.shard("b", "small").error)
        await world.until(lambda: world.shard("b", "small").retries > 10)
        assert world.attempt("b").state is State.STAGED
        world.store.plan = rules()
        await world.flusher.drain()
    world.check("b")


async def test_invalid_part_on_complete_sends_only_the_missing_part(autojump_clock, world: World):
    world.save("a", {"f": content(5 * PART)})
    forgotten = []

    def plan(call: Call):
        if call.operation == "complete_multipart" and not forgotten:
            forgotten.append(True)
            del next(iter(world.memory._uploads.values())).parts[3]
        return

    world.store.plan = plan
    await world.drained()
    world.check("a")
    assert world.count("upload_part") == 6
    assert world.count("create_multipart") == 1


@pytest.mark.parametrize("operation", ["upload_part", "complete_multipart", "list_parts"])
async def test_an_upload_that_was_aborted_starts_over(autojump_clock, world: World, operation: str):
    world.save("a", {"f": content(4 * PART)})
    aborted = []

    def plan(call: Call):
        if call.operation == operation and len(aborted) < 1 and world.count("upload_part") >= 2:
            aborted.append(True)
            for upload in world.memory.list_multiparts(""):
                world.memory.abort_multipart(upload.key, upload.upload_id)
        return

    if operation == "list_parts":
        world.store.crash_after = 4
        assert await world.crashes()
        world.restart()
        world.store.plan = lambda call: (
            [world.memory.abort_multipart(u.key, u.upload_id) for u in world.memory.list_multiparts("")] and None
            if call.operation == "list_parts"
            else None
        )
    else:
        world.store.plan = plan
    await world.drained()
    world.check("a")
    assert world.count("create_multipart") == (1 if operation == "list_parts" else 2)


async def test_a_store_that_answers_500_for_an_upload_that_is_gone(autojump_clock, world: World):
    """A 500 for a completion proves nothing by itself; that the upload is not listed any more does."""
    world.save("a", {"f": content(3 * PART)})
    first: list[str] = []

    def plan(call: Call):
        if call.operation != "complete_multipart":
            return None
        if not first:
            first.extend(upload.upload_id for upload in world.memory.list_multiparts(""))
            world.memory.abort_multipart(world.shard("a", "f").key, first[0])
        return lost_request if world.shard("a", "f").upload_id in first else None

    world.store.plan = plan
    await world.drained()
    world.check("a")
    assert world.count("create_multipart") == 2


async def test_a_store_that_answers_500_for_parts_of_an_upload_that_is_gone(autojump_clock, world: World):
    """moto 5.2 does, for ever: the part is not to be tried for ever."""
    world.save("a", {"f": content(3 * PART)})
    first: list[str] = []

    def plan(call: Call):
        if call.operation != "upload_part":
            return None
        if not first:
            first.extend(upload.upload_id for upload in world.memory.list_multiparts(""))
            world.memory.abort_multipart(world.shard("a", "f").key, first[0])
        gone = world.shard("a", "f").upload_id in first
        return refused(UnavailableError("fault: 500", reason="5xx")) if gone else None

    world.store.plan = plan
    await world.drained()
    world.check("a")
    assert world.count("create_multipart") == 2


async def test_a_run_that_is_lost_sends_nothing_more_and_starts_anew_later(autojump_clock, world: World):
    """The fence holds back the very next part; the upload is aborted and forgotten."""
    world.save("a", {"f": content(9 * PART)})
    fence = RunRecord(run="run", epoch=1, owner="me", fenced_by="other")

    def plan(call: Call):
        if call.operation == "upload_part" and world.count("upload_part") == 4:
            world.journal.write_now(lambda txn: txn.runs.put("run", fence))

    world.store.plan = plan
    async with world.running():
        await world.until(lambda: not world.memory.list_multiparts("") and world.count("upload_part") >= 4)
        await world.until(lambda: not world.shard("a", "f").upload_id)
    assert world.count("upload_part") == 4
    world.restart()
    world.journal.write_now(lambda txn: txn.runs.put("run", msgspec.structs.replace(fence, epoch=2, fenced_by="")))
    await world.drained()
    world.check("a")
    assert world.count("upload_part") == 9


async def test_409_on_complete_aborts_and_sends_everything_again(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)})
    world.store.plan = rules(Rule("complete_multipart", conflict))
    await world.drained()
    world.check("a")
    assert world.count("create_multipart") == 2
    assert world.count("upload_part") == 6
    assert world.count("abort_multipart") == 1


@pytest.mark.parametrize("size", [5, 3 * PART])
async def test_other_bytes_under_the_key_end_the_save(autojump_clock, world: World, size: int):
    world.save("bad", {"f": content(size)})
    world.save("good", {"f": content(size)})
    world.memory.put(world.shard("bad", "f").key, b"x" * size, condition=None)
    async with world.running():
        await world.flusher.drain()
        await world.until(lambda: world.memory.list_multiparts("") == [])
    world.check("good")
    assert world.attempt("bad").state is State.ABANDONED
    assert "other bytes" in world.attempt("bad").error
    assert len(list(world.memory.list_versions(world.shard("bad", "f").key))) == 1


def of_run(name: str):
    return lambda key: key.startswith(f"runs/{name}/")


async def test_a_long_storm_on_one_run_stops_no_other_and_costs_no_memory(autojump_clock, world: World):
    world.save("a", {f"f{n}": content(30 * PART, n) for n in range(8)}, run="slow")
    world.store.plan = rules(Rule("*", throttled, key=of_run("slow"), nth=0))
    start = trio.current_time()
    async with world.running():
        for number in range(10):
            world.save(f"b{number}", {"small": content(9), "large": content(20 * PART)}, run="quick")
            world.flusher.wake()
            await world.until(lambda n=number: world.attempt(f"b{n}").state is State.FLUSHED)
            await trio.sleep(60)
        assert world.attempt("a").state is State.STAGED
        statistics = world.flusher.statistics()
        assert statistics.most_bytes_in_flight <= 4 * PART
        assert statistics.bytes_in_flight == 0
        assert statistics.resting == {"slow"}
        asked = len(world.store.operations(of_run("slow")))
        assert asked < 200  # back-off: eight files in ten minutes
        world.store.plan = rules()
        await world.flusher.drain()
    assert trio.current_time() - start >= 600
    world.check("a", *(f"b{number}" for number in range(10)))


async def test_one_run_that_hangs_leaves_slots_to_the_others(world: World):
    """Requests of one run hang in their threads: the other run goes on, and only the shared slots are held."""
    world.use_threads()
    go = threading.Event()

    def hang(request):
        assert go.wait(60)
        return request()

    world.store.plan = rules(Rule("put", hang, key=of_run("slow"), nth=0))
    world.save("a", {f"f{n}": content(9, n) for n in range(8)}, run="slow")
    world.save("b", {f"f{n}": content(9, n) for n in range(8)}, run="quick")
    try:
        async with world.running():
            await world.until(lambda: world.attempt("b").state is State.FLUSHED)
            assert world.attempt("a").state is State.STAGED
            go.set()
            await world.flusher.drain()
    finally:
        go.set()
    world.check("a", "b")


async def test_refused_credentials_are_shown_and_tried_again(autojump_clock, world: World):
    world.save("a", {"f": content(5)})
    world.store.plan = rules(Rule("put", refused(DeniedError("AccessDenied")), nth=0))
    async with world.running():
        await world.until(lambda: "AccessDenied" in world.shard("a", "f").error)
        world.store.plan = rules()
        await world.flusher.drain()
    world.check("a")


@pytest.mark.parametrize("error", [DeniedError("AccessDenied"), NoStoreError("NoSuchBucket")])
async def test_what_is_wrong_with_the_store_is_not_asked_once_for_each_file(autojump_clock, world: World, error):
    world.save("a", {f"f{n}": content(5, n) for n in range(50)})
    world.store.plan = rules(Rule("put", refused(error), nth=0))
    async with world.running():
        await trio.sleep(0.3)
        assert 0 < world.count("put") < 25
        world.store.plan = rules()
        await world.flusher.drain()
    world.check("a")


@pytest.mark.parametrize("size", [5, 6 * PART])
@pytest.mark.parametrize("operation", ["put", "create_multipart", "upload_part", "complete_multipart"])
async def test_an_early_file_dropped_while_it_is_sent(autojump_clock, world: World, size: int, operation: str):
    world.save("a", {"f": content(size)}, early=True)
    record = world.shard("a", "f")

    def plan(call: Call):
        if call.operation == operation:
            world.journal.write_now(lambda txn: txn.drop_shard(record))
            world.pins.drop("a", "a-f")
            world.flusher.wake()
        return

    world.store.plan = plan
    async with world.running():
        await trio.sleep(60)
        if (operation == "put") == (size == 5):
            assert world.flusher.statistics().discarded == 1
    with world.journal.read() as txn:
        assert txn.attempts.get("a").state is State.OPEN
        assert txn.parts.count() == 0
        left = txn.shards_of("a")
    assert all(shard.pin for shard in left)
    assert world.memory.list_multiparts("") == []


async def test_a_dropped_upload_is_aborted_even_when_the_store_is_slow(autojump_clock, world: World):
    world.save("a", {"f": content(6 * PART)}, early=True)
    record = world.shard("a", "f")
    world.store.plan = rules(Rule("upload_part", throttled, nth=0))
    async with world.running():
        await world.until(lambda: world.shard("a", "f").retries > 3)
        world.store.plan = rules(*(Rule("abort_multipart", throttled, nth=n) for n in (1, 2, 3)))
        world.journal.write_now(lambda txn: txn.drop_shard(record))
        world.flusher.wake()
        await world.until(lambda: world.memory.list_multiparts("") == [])
    assert world.count("abort_multipart") == 4


async def test_orphaned_uploads_of_this_member_are_aborted_and_others_left_alone(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)})
    world.save("done", {"f": content(3 * PART)}, state=State.ABANDONED)
    mine = world.keys.shard("run", "gone", MEMBER, "s", "f")
    done = world.shard("done", "f").key
    world.change_shard("done", "f", upload_id=world.memory.create_multipart(done), part_size=PART)
    world.memory.create_multipart(mine)
    world.memory.create_multipart(world.shard("a", "f").key)
    other_member = world.memory.create_multipart(world.keys.shard("run", "gone", "node1", "s", "f"))
    other_run = world.memory.create_multipart(world.keys.shard("elsewhere", "gone", MEMBER, "s", "f"))
    world.store.plan = rules(Rule("list_multiparts", throttled), Rule("abort_multipart", throttled))
    async with world.running():
        await world.flusher.drain()
        await world.until(lambda: len(world.memory.list_multiparts("")) == 2)
        await world.until(lambda: world.flusher.statistics().orphans_aborted >= 2)
    assert {u.upload_id for u in world.memory.list_multiparts("")} == {other_member, other_run}


async def test_a_store_that_cannot_list_uploads_says_so(autojump_clock, world: World):
    world.save("a", {"f": content(5)})
    world.store.plan = rules(Rule("list_multiparts", refused(DeniedError("no ListMultipartUploads"))))
    await world.drained()
    world.check("a")
    assert world.flusher.statistics().orphan_errors == {"run": "no ListMultipartUploads"}


async def test_a_full_journal_stops_nothing_for_good(autojump_clock, world: World, monkeypatch: pytest.MonkeyPatch):
    world.save("a", {"f": content(5), "g": content(3 * PART)})
    real, full = world.journal.write, [True]

    async def write(fn):
        if full[0]:
            raise StagingError("no space")
        return await real(fn)

    monkeypatch.setattr(world.journal, "write", write)
    async with world.running():
        await trio.sleep(60)
        assert world.flusher.statistics().failures["StagingError"] > 0
        full[0] = False
        await world.flusher.drain()
    world.check("a")


async def test_cancelling_leaves_everything_for_the_next_start(autojump_clock, world: World):
    world.save("a", {"f": content(8 * PART)})
    world.store.plan = rules(*(Rule("upload_part", throttled, nth=n) for n in range(5, 100)))
    with trio.move_on_after(30):
        await world.drained()
    assert world.flusher.pending() == (1, 8 * PART)
    world.restart()
    assert isinstance(world.store, FaultyStore)
    await world.drained()
    world.check("a")
    assert world.count("upload_part") == 4
    assert os.listdir(world.staging.pins) == ["a"]
