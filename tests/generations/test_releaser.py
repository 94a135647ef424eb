"""releaser.py: pins go when nobody needs them any more, and old attempts are forgotten."""

from __future__ import annotations

import shutil

import trio

from cachefs.formats.records import State
from cachefs.generations import attempts, releaser
from cachefs.generations.releaser import Releaser
from tests.generations.mounted import publish_all, zipped


async def test_pins_go_when_an_attempt_is_over_and_old_attempts_are_forgotten(mount, monkeypatch):
    monkeypatch.setattr(attempts, "HISTORY", 3)
    for step in range(10):
        await mount.save(f"run/step-{step}", **{"0_0": b"one"})

    async with trio.open_nursery() as nursery:
        await nursery.start(mount.releaser.run)
        await mount.journal.write(publish_all)
        mount.releaser.wake()
        with trio.fail_after(30):
            while len(mount.attempts()) > 3:
                await mount.journal.wait_changed()
        nursery.cancel_scope.cancel()
    assert mount.pins.attempts() == set()
    assert [attempt.step for attempt in mount.attempts()] == [7, 8, 9]


async def test_without_publication_a_staged_save_ends_when_all_its_files_are_removed_or_replaced(mount):
    """A moved file is still there; a save with one file left is kept; so is one that the store knows of."""
    for step in range(1, 6):
        await mount.save(f"run/step-{step}", **{"0_0": b"one"})
    await mount.write("run/last.pt", zipped(b"old"))
    await mount.write("run/last.pt", zipped(b"new"))
    saves = {attempt.attempt: attempt for attempt in mount.attempts()}
    removed, partly, moved, announced, unsynced, replaced, last = saves

    def staged(txn):
        for attempt in saves:
            txn.update_attempt(attempt, state=State.OPEN if attempt == unsynced else State.STAGED)
        txn.update_attempt(announced, opened_epoch=1)

    await mount.journal.write(staged)
    for step in (1, 4, 5):
        shutil.rmtree(mount.staging.tree / f"run/step-{step}")
    (mount.staging.tree / "run/step-2/__0_0.distcp").unlink()
    (mount.staging.tree / "run/step-3").rename(mount.staging.tree / "run/kept")
    await Releaser(mount.journal, mount.pins, publish=False)._release()
    assert mount.pins.attempts() == {partly, moved, announced, unsynced, last}
    states = {attempt.attempt: attempt.state for attempt in mount.attempts()}
    assert {attempt for attempt, state in states.items() if state is State.ABANDONED} == {removed, replaced}


async def test_with_publication_a_staged_save_keeps_its_pins_when_its_files_are_removed(mount):
    await mount.save("run/step-1", **{"0_0": b"one"})
    (attempt,) = mount.attempts()
    await mount.journal.write(lambda txn: txn.update_attempt(attempt.attempt, state=State.STAGED))
    shutil.rmtree(mount.staging.tree / "run/step-1")
    await mount.releaser._release()
    assert mount.pinned(attempt)["__0_0.distcp"] == b"one"


async def test_without_publication_files_that_are_removed_are_found_although_nobody_tells(mount, monkeypatch, nursery):
    monkeypatch.setattr(releaser, "LOOK", 0.01)
    await mount.save("run/step-1", **{"0_0": b"one"})
    (attempt,) = mount.attempts()
    await mount.journal.write(lambda txn: txn.update_attempt(attempt.attempt, state=State.STAGED))
    await nursery.start(Releaser(mount.journal, mount.pins, publish=False).run)
    shutil.rmtree(mount.staging.tree / "run/step-1")
    with trio.fail_after(30):
        while mount.attempts()[0].state is not State.ABANDONED:
            await mount.journal.wait_changed()


async def test_without_publication_the_pins_of_an_abandoned_save_go(mount):
    await mount.save("run/step-1", **{"0_0": b"one"})
    (attempt,) = mount.attempts()
    await mount.journal.write(lambda txn: txn.update_attempt(attempt.attempt, state=State.ABANDONED, error="lost"))
    await Releaser(mount.journal, mount.pins, publish=False)._release()
    assert mount.pins.attempts() == set()
    assert mount.attempts()[0].error == "lost"


async def test_a_record_is_not_forgotten_before_its_pins_are_dropped(mount, monkeypatch):
    monkeypatch.setattr(attempts, "HISTORY", 1)
    for step in range(3):
        await mount.save(f"run/step-{step}", **{"0_0": b"one"})

    await mount.journal.write(publish_all)
    mount.pins.drop_attempt(mount.attempts()[0].attempt)
    mount.pins.drop_attempt(mount.attempts()[2].attempt)
    await mount.journal.write(lambda txn: attempts.forget(txn, mount.pins))
    assert [attempt.step for attempt in mount.attempts()] == [1, 2]
