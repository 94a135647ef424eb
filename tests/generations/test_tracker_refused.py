"""The tracker while the journal refuses to write: nothing is lost, and what is owed is written later."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cachefs.errors import StagingError
from cachefs.formats.records import State
from cachefs.generations import retrying
from cachefs.generations.actions import CloseSave
from cachefs.staging.changes import Change, Kind
from cachefs.waiting import each
from tests.generations.mounted import Full, metadata, zipped


async def test_a_tracker_is_written_although_the_journal_fails(mount, monkeypatch):
    await mount.write("run/global_step1/mp_rank_00_model_states.pt", zipped(b"x"))
    disk = Full(mount, monkeypatch)
    disk.full = True
    await mount.write("run/latest", b"global_step1")
    assert mount.attempts()[0].signals == {}
    disk.full = False
    await mount.tracker._catch_up()
    assert mount.attempts()[0].signals == {"deepspeed": "latest names it"}


async def test_a_save_that_cannot_be_journaled_fails_and_the_next_change_starts_another(mount, monkeypatch):
    disk = Full(mount, monkeypatch)
    disk.full = True
    with pytest.raises(StagingError):
        await mount.write("run/step-5/__0_0.distcp", b"one")
    await mount.report(Kind.CLOSED, "run/step-5/__0_0.distcp")
    assert mount.tracker.open_saves() == {}
    disk.full = False
    with trio.fail_after(30):
        await mount.save("run/step-5", **{"1_0": b"two"})
        await mount.held(Kind.TRUNCATED, "run/step-5/__0_0.distcp")
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    assert mount.pinned(attempt)["__1_0.distcp"] == b"two"


async def test_a_save_that_closes_before_its_failed_opening_is_known_freezes_nothing(
    mount, monkeypatch, declared_warnings
):
    declared_warnings("the journal failed")
    disk = Full(mount, monkeypatch)
    (mount.staging.tree / "run").mkdir()
    (mount.staging.tree / "run/model.pt").write_bytes(zipped(b"x"))
    disk.full = True
    failed = []

    async def report(kind, **facts):
        try:
            await mount.report(kind, "run/model.pt", **facts)
        except StagingError:
            failed.append(kind)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            opening = mount.tracker.after(Change(Kind.CREATED, b"run/model.pt", writers=1))
            nursery.start_soon(report, Kind.CLOSED)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(StagingError):
                await opening
        await mount.held(Kind.TRUNCATED, "run/model.pt")
    assert failed == [Kind.CLOSED]


async def test_of_several_things_to_do_each_is_done_although_one_fails():
    done = []

    async def fail():
        raise StagingError("first")

    async def work():
        done.append(1)

    with pytest.raises(StagingError, match="first"):
        await each([fail(), work()])
    assert done == [1]


async def test_a_close_that_the_journal_refused_is_journaled_when_it_can_be(mount, monkeypatch, declared_warnings):
    """With the bytes that the save had when it closed."""
    declared_warnings("the journal failed")
    disk = Full(mount, monkeypatch)
    await mount.write("run/step-5/__0_0.distcp", b"one")
    await mount.write("run/step-5/.metadata.tmp", metadata("0_0"))
    disk.full = True
    with pytest.raises(StagingError):
        await mount.rename("run/step-5/.metadata.tmp", "run/step-5/.metadata")
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.tracker.run)
        await nursery.start(mount.releaser.run)
        await disk.refuses()
        (mount.staging.tree / "run/step-5/__0_0.distcp").unlink()
        assert mount.attempts()[0].closed_at is None
        assert mount.tracker.closing() == ["run/step-5"]  # it goes on by itself: a stop waits for it
        disk.full = False
        with trio.fail_after(30):
            while mount.attempts()[0].closed_at is None:
                await mount.journal.wait_changed()
            while mount.tracker.closing():
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    (attempt,) = mount.attempts()
    assert mount.pinned(attempt) == {"__0_0.distcp": b"one", ".metadata": metadata("0_0")}


@pytest.mark.parametrize(
    ("temporary", "final", "file"),
    [("7.orbax-checkpoint-tmp", "7", "_CHECKPOINT_METADATA"), ("model.pt.tmp", "model.pt", "")],
)
async def test_a_save_that_was_renamed_into_place_is_journaled_when_it_can_be(
    mount, monkeypatch, declared_warnings, temporary, final, file
):
    """Opened and closed by the rename, which cannot be undone and fails when it is tried again."""
    declared_warnings("the journal failed")
    disk = Full(mount, monkeypatch)
    path = Path("run", temporary, file)
    await mount.write(str(path), zipped(b"one"))
    disk.full = True
    with pytest.raises(StagingError):
        await mount.rename(f"run/{temporary}", f"run/{final}")
    assert mount.attempts() == []
    await mount.held(Kind.TRUNCATED, str(Path("run", final, file)))
    (mount.staging.tree / "run" / final / file).unlink()
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.tracker.run)
        await disk.refuses()
        disk.full = False
        with trio.fail_after(30):
            while not mount.attempts():
                await mount.journal.wait_changed()
        nursery.cancel_scope.cancel()
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    assert mount.pinned(attempt) == {file or final: zipped(b"one")}


async def test_early_uploads_go_on_after_the_journal_failed(mount, monkeypatch, declared_warnings):
    declared_warnings("early upload: the journal failed")
    monkeypatch.setattr(retrying, "LAST", 0.01)
    disk = Full(mount, monkeypatch)
    await mount.write("run/step-5/__0_0.distcp", b"one")
    disk.full = True
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.tracker.early.run)
        with trio.fail_after(30):
            await disk.refused.wait()
            disk.full = False
            (attempt,) = mount.attempts()
            while not mount.recorded(attempt):
                await mount.journal.wait_changed()
        nursery.cancel_scope.cancel()
    assert mount.pinned(attempt) == {"__0_0.distcp": b"one"}


async def test_an_end_that_the_journal_refused_is_journaled_when_it_can_be(mount, monkeypatch, declared_warnings):
    declared_warnings("the journal failed")
    disk = Full(mount, monkeypatch)
    await mount.write("run/step-5/__0_0.distcp", b"one")
    disk.full = True
    with pytest.raises(StagingError):
        await mount.rename("run/step-5", "run/elsewhere")
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.tracker.run)
        await disk.refuses()
        assert len(mount.tracker._effects._owed) <= 1
        disk.full = False
        with trio.fail_after(30):
            while mount.attempts()[0].state is not State.ABANDONED:
                await mount.journal.wait_changed()
        nursery.cancel_scope.cancel()


async def test_a_close_by_time_stays_pending_while_the_journal_fails(mount, monkeypatch, declared_warnings):
    declared_warnings("the journal failed")
    disk = Full(mount, monkeypatch)
    await mount.write("run/step-5/__0_0.distcp", b"one")
    due = [CloseSave(b"run/step-5", "", "quiet", 5)]
    monkeypatch.setattr(mount.tracker._detector, "due", lambda _now, _view: [due.pop()] if due else [])
    disk.full = True
    async with trio.open_nursery() as nursery:
        await nursery.start(mount.tracker.run)
        await disk.refuses()
        assert mount.attempts()[0].closed_at is None
        disk.full = False
        with trio.fail_after(30):
            while mount.attempts()[0].closed_at is None:
                await mount.journal.wait_changed()
        nursery.cancel_scope.cancel()
    assert mount.pinned(mount.attempts()[0]) == {"__0_0.distcp": b"one"}
