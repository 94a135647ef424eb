"""The tracker on a real journal and real pins: what is journaled when, and what a restart takes up."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
import trio

from cachefs.errors import CachefsError, NotFoundError
from cachefs.formats.records import State
from cachefs.generations.closing import Closer
from cachefs.staging.changes import Change, Kind
from tests.generations.mounted import Mount, metadata, zipped


async def test_the_first_file_is_acknowledged_after_its_attempt_is_journaled(mount):
    await mount.write("run/step-5/__0_0.distcp", b"x")
    (attempt,) = mount.attempts()
    assert (attempt.run, attempt.generation, attempt.step, attempt.state) == ("run", "step-5", 5, State.OPEN)
    assert attempt.closed_at is None
    assert mount.hints == ["opened"]


async def test_when_the_closing_operation_returns_every_file_is_pinned_and_journaled(mount):
    await mount.save("run/step-5", **{"0_0": b"one", "1_0": b"two"})
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    files = {"__0_0.distcp": b"one", "__1_0.distcp": b"two", ".metadata": metadata("0_0", "1_0")}
    assert mount.pinned(attempt) == files
    assert (attempt.files, attempt.size) == (3, sum(map(len, files.values())))
    assert mount.hints[-1] == "closed"


async def test_rotation_does_not_touch_a_closed_save_and_cancels_an_open_one(mount):
    await mount.save("run/step-1", **{"0_0": b"kept"})
    await mount.remove("run/step-1/__0_0.distcp")
    await mount.write("run/step-2/__0_0.distcp", b"gone")
    (mount.staging.tree / "run/step-2/__0_0.distcp").unlink()
    (mount.staging.tree / "run/step-2").rmdir()
    await mount.report(Kind.REMOVED, "run/step-2/__0_0.distcp")
    await mount.report(Kind.REMOVED, "run/step-2", is_dir=True)
    closed, cancelled = mount.attempts()
    assert mount.pinned(closed)["__0_0.distcp"] == b"kept"
    assert cancelled.state is State.ABANDONED
    assert mount.pinned(cancelled) == {}


async def test_overwriting_a_file_that_is_a_save_of_its_own_makes_another_attempt(mount):
    for text in (b"first", b"second"):
        await mount.write("run/model.pt", zipped(text))
    one, two = mount.attempts()
    assert mount.pinned(one) == {"model.pt": zipped(b"first")}
    assert mount.pinned(two) == {"model.pt": zipped(b"second")}


async def test_a_change_of_a_closing_save_waits_until_it_is_pinned(mount, monkeypatch):
    """And nothing else waits."""
    may_pin, order = trio.Event(), []
    run_sync = trio.to_thread.run_sync

    async def slowly(*arguments, **options):
        await may_pin.wait()
        order.append("pinned")
        return await run_sync(*arguments, **options)

    async def overwrite(nursery):
        await mount.held(Kind.TRUNCATED, "run/model.pt")
        order.append("overwritten")

    async with trio.open_nursery() as nursery:
        (mount.staging.tree / "run").mkdir()
        (mount.staging.tree / "run/model.pt").write_bytes(zipped(b"x"))
        await mount.report(Kind.CREATED, "run/model.pt", writers=1)
        monkeypatch.setattr(trio.to_thread, "run_sync", slowly)
        nursery.start_soon(mount.report, Kind.CLOSED, "run/model.pt")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(overwrite, nursery)
        await mount.held(Kind.TRUNCATED, "run/other.pt")
        await trio.testing.wait_all_tasks_blocked()
        assert order == []
        may_pin.set()
    assert order[0] == "pinned"
    assert order[-1] == "overwritten"


async def pin_early(mount: Mount, nursery, path: str) -> None:
    """Write a file of an open save and wait until it is pinned early."""
    await nursery.start(mount.tracker.early.run)
    await mount.write(path, b"early")
    (attempt,) = mount.attempts()
    with trio.fail_after(30):
        while not mount.recorded(attempt):
            await mount.journal.wait_changed()


async def test_an_early_pin_that_is_being_dropped_is_not_part_of_the_closing_save(mount, monkeypatch):
    """Whoever opens the file again is before the close: the close pins the file itself."""
    async with trio.open_nursery() as nursery:
        await pin_early(mount, nursery, "run/step-5/__0_0.distcp")
        nursery.cancel_scope.cancel()
    (early,) = mount.pins.shards(mount.attempts()[0].attempt)
    await mount.write("run/step-5/.metadata.tmp", metadata("0_0"))
    may_commit, commit = threading.Event(), mount.journal._commit

    def slowly(batch):
        may_commit.wait(30)
        commit(batch)

    monkeypatch.setattr(mount.journal, "_commit", slowly)
    dropping = mount.tracker.before(Change(Kind.OPENED, b"run/step-5/__0_0.distcp"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: dropping)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(mount.rename, "run/step-5/.metadata.tmp", "run/step-5/.metadata")
        await trio.testing.wait_all_tasks_blocked()
        may_commit.set()
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    assert early not in mount.pins.shards(attempt.attempt)
    assert mount.pinned(attempt) == {"__0_0.distcp": b"early", ".metadata": metadata("0_0")}


async def test_a_close_pins_again_what_lost_its_early_pin_while_it_ran(mount, monkeypatch):
    async with trio.open_nursery() as nursery:
        await pin_early(mount, nursery, "run/step-5/__0_0.distcp")
        nursery.cancel_scope.cancel()
    (attempt,) = mount.attempts()
    with mount.journal.read() as txn:
        (shard,) = txn.shards_of(attempt.attempt)
    close, closes = Closer.close, []

    def losing(self, *arguments, **options):
        closed = close(self, *arguments, **options)
        if not closes:
            mount.journal.write_now(lambda txn: txn.drop_shard(shard))
            mount.pins.drop(shard.attempt, shard.shard)
        closes.append(closed)
        return closed

    monkeypatch.setattr(Closer, "close", losing)
    await mount.save("run/step-5", **{"1_0": b"two"})
    (attempt,) = mount.attempts()
    assert len(closes) == 2
    assert mount.pinned(attempt) == {"__0_0.distcp": b"early", "__1_0.distcp": b"two", ".metadata": metadata("1_0")}


async def test_a_file_behind_a_link_that_replaced_its_directory_is_not_pinned_early(mount):
    """The daemon is root; the link may lead to files of others."""
    other = mount.root / "other"
    other.mkdir()
    (other / "key").write_bytes(b"secret")
    await mount.write("run/step-5/__0_0.distcp", b"one")
    (mount.staging.tree / "run/step-5/sub").symlink_to(other)
    (attempt,) = mount.attempts()
    await mount.tracker.early._pin(b"run/step-5/sub/key", attempt.attempt, b"run/step-5")
    assert mount.pins.shards(attempt.attempt) == set()


async def test_what_was_to_be_pinned_early_is_forgotten_when_its_directory_goes(mount):
    await mount.write("run/step-5/sub/__0_0.distcp", b"one")
    assert mount.tracker.early._due
    os.rename(mount.staging.tree / "run/step-5/sub", mount.staging.tree / "run/step-5/gone")
    await mount.report(Kind.RENAMED, "run/step-5/gone", old=b"run/step-5/sub", is_dir=True)
    assert not mount.tracker.early._due


async def test_a_close_by_hand_returns_when_the_save_is_closed(mount):
    """Not while somebody still writes a file of it."""
    await mount.write("run/step-5/__0_0.distcp", b"one")
    await mount.report(Kind.OPENED, "run/step-5/__0_0.distcp", writers=1)
    done = []

    async def close():
        done.append(await mount.tracker.close_now(b"run/step-5"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        await mount.journal.barrier()
        await trio.testing.wait_all_tasks_blocked()
        assert done == []
        await mount.report(Kind.CLOSED, "run/step-5/__0_0.distcp")
    (attempt,) = mount.attempts()
    assert done == [attempt.attempt]
    assert attempt.closed_at is not None


async def test_a_close_by_hand_says_why_the_save_was_abandoned(mount):
    await mount.write("run/step-5/__0_0.distcp", b"one")
    await mount.report(Kind.OPENED, "run/step-5/__0_0.distcp", writers=1)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def close():
                with pytest.raises(CachefsError, match="abandoned: renamed to run/elsewhere"):
                    await mount.tracker.close_now(b"run/step-5")

            nursery.start_soon(close)
            await trio.testing.wait_all_tasks_blocked()
            await mount.rename("run/step-5", "run/elsewhere")


async def test_two_closes_by_hand_at_once_are_one(mount):
    (mount.staging.tree / "some").mkdir()
    (mount.staging.tree / "some/file").write_bytes(b"x")
    found = []

    async def close():
        found.append(await mount.tracker.close_now(b"some"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(close)
        nursery.start_soon(close)
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    assert found == [attempt.attempt] * 2


async def test_closed_by_hand_again_a_save_keeps_its_attempt_until_something_changes(mount):
    """A file more, a file less, or an attempt that was abandoned: that is a new save. So is a directory that has moved
    since, or that another process has closed: what is in it may be something else.
    """
    await mount.write("some/one", b"x")
    await mount.write("some/two", b"x")

    async def again() -> bool:
        before = len(mount.attempts())
        attempt = await mount.tracker.close_now(b"some")
        assert mount.attempts()[-1].attempt == attempt
        return len(mount.attempts()) == before

    assert not await again()
    assert await again()
    await mount.write("some/three", b"x")
    assert not await again()
    assert await again()
    await mount.remove("some/one")
    assert not await again()
    assert await again()
    newest = mount.attempts()[-1].attempt
    await mount.journal.write(lambda txn: txn.update_attempt(newest, state=State.ABANDONED))
    assert not await again()
    assert await again()
    await mount.write("other/one", b"y")
    await mount.write("other/two", b"y")
    await mount.write("other/three", b"y")
    await mount.remove("other/one")
    await mount.tracker.close_now(b"other")
    await mount.rename("some", "old")
    await mount.rename("other", "some")
    assert not await again()
    mount.die()
    mount.start()
    await mount.tracker.resume()
    assert not await again()
    assert await again()


@pytest.mark.parametrize(
    ("temporary", "final", "file"),
    [
        ("run/7.orbax-checkpoint-tmp", "run/7", "_CHECKPOINT_METADATA"),
        ("run/tmp-checkpoint-8", "run/checkpoint-8", "trainer_state.json"),
    ],
)
async def test_a_file_written_several_times_in_a_temporary_directory_is_one_save(mount, temporary, final, file):
    """Nobody waits for the name that the same program will give it; and the rename proves one save."""
    with trio.fail_after(30):
        for text in (b"{}", b"once more", b"last"):
            await mount.write(f"{temporary}/{file}", text)
        assert mount.attempts() == []
        await mount.rename(temporary, final)
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    assert not attempt.rewritten
    assert mount.pinned(attempt) == {file: b"last"}


async def test_what_is_written_again_after_the_rename_may_be_the_next_save(mount):
    """The rename closes nothing here: the guard of the preset is not in the directory yet."""
    await mount.write("run/tmp-checkpoint-8/model.safetensors", b"one")
    await mount.rename("run/tmp-checkpoint-8", "run/checkpoint-8")
    (attempt,) = mount.attempts()
    assert (attempt.closed_at, attempt.rewritten) == (None, False)
    await mount.write("run/checkpoint-8/model.safetensors", b"two")
    (attempt,) = mount.attempts()
    assert attempt.rewritten


async def test_what_is_written_again_may_be_the_next_save_also_in_a_run_that_was_renamed(mount):
    """Before the rename, or after it; and the attempt of the old name was dropped by the training."""
    for number, again in ((1, "run"), (2, "kept")):
        name = f"__{number}_0.distcp"
        await mount.write(f"run/step-{number}/{name}", b"one")
        if again == "run":
            await mount.write(f"run/step-{number}/{name}", b"two")
        await mount.rename("run", "kept")
        if again == "kept":
            await mount.write(f"kept/step-{number}/{name}", b"two")
        old, new = [one for one in mount.attempts() if one.generation == f"step-{number}"]
        assert (old.state, old.cancelled) == (State.ABANDONED, True)
        assert (new.path, new.rewritten) == (f"kept/step-{number}", True)
        shutil.rmtree(mount.staging.tree / "kept")


async def test_a_rewritten_temporary_directory_that_is_closed_by_hand_says_so(mount):
    """Without the rename nothing proves one save."""
    with trio.fail_after(30):
        for text in (b"{}", b"once more"):
            await mount.write("run/7.orbax-checkpoint-tmp/_CHECKPOINT_METADATA", text)
        await mount.tracker.close_now(b"run/7.orbax-checkpoint-tmp")
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    assert attempt.rewritten


async def test_a_path_through_a_link_is_not_closed(mount):
    (mount.root / "other/step-5").mkdir(parents=True)
    (mount.staging.tree / "link").symlink_to(mount.root / "other")
    with pytest.raises(NotFoundError):
        await mount.tracker.close_now(b"link/step-5")
