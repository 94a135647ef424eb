"""What the next daemon makes of saves that were under way when the one before it ended, or the machine."""

from __future__ import annotations

import os

import msgspec
import pytest
import trio

from cachefs import clock
from cachefs.formats.manifest import Pin
from cachefs.formats.records import State
from cachefs.generations import attempts
from cachefs.generations.catalog import DEEPSPEED
from cachefs.generations.effects import Effects
from tests.generations.mounted import metadata, zipped


@pytest.mark.parametrize("journaled", [True, False])
async def test_a_save_whose_signal_came_before_the_kill_is_closed_by_the_next_start(mount, journaled):
    """Whether the close had reached the journal or not: the marker differs from its baseline."""
    if journaled:
        await mount.save("run/step-5", **{"0_0": b"one"})
    else:
        await mount.write("run/step-5/__0_0.distcp", b"one")
        (mount.staging.tree / "run/step-5/.metadata").write_bytes(metadata("0_0"))
    mount.die()
    mount.start()
    await mount.tracker.resume()
    (attempt,) = mount.attempts()
    assert attempt.closed_at is not None
    assert mount.pinned(attempt) == {"__0_0.distcp": b"one", ".metadata": metadata("0_0")}


@pytest.mark.parametrize(
    ("old", "new", "files"),
    [
        ("run/step2-tmp", "run/step2", {"model.pt": zipped(b"x"), "config.yaml": b"{}"}),
        ("run/foo.tmp", "run/foo", {"__0_0.distcp": b"x", ".metadata": metadata("0_0")}),
        ("run/built elsewhere", "run/last.ckpt", {"meta.pt": zipped(b"x")}),
    ],
    ids=["the rename is the signal", "a marker was written before", "nobody knew the old name"],
)
async def test_a_directory_that_got_its_name_right_before_the_kill_is_closed_by_the_next_start(
    mount, monkeypatch, old, new, files
):
    for name, data in files.items():
        await mount.write(f"{old}/{name}.tmp", data)
        await mount.rename(f"{old}/{name}.tmp", f"{old}/{name}")

    async def never(*_arguments, **_options):
        await trio.sleep_forever()

    with monkeypatch.context() as patch:
        patch.setattr(Effects, "_pin", never)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.rename, old, new)
            with trio.fail_after(30):
                while not any(attempt.path == new for attempt in mount.attempts()):
                    await mount.journal.wait_changed()
            nursery.cancel_scope.cancel()
    assert mount.attempts()[-1].closed_at is None
    mount.die()
    mount.start()
    await mount.tracker.resume()
    attempt = mount.attempts()[-1]
    assert attempt.closed_at is not None
    assert mount.pinned(attempt) == files


@pytest.mark.parametrize("moved", [False, True])
async def test_a_tracker_that_named_a_save_before_the_kill_closes_it_after_it(mount, moved):
    """It names the next one by then; so the journal must know."""
    for step in (1, 2):
        await mount.write(f"run/global_step{step}/mp_rank_00_model_states.pt", zipped(b"x"))
        await mount.write("run/latest", b"global_step%d" % step)
    await mount.write("run/global_step3/mp_rank_00_model_states.pt", zipped(b"x"))
    if moved:
        await mount.rename("run", "kept")
    mount.die()
    mount.start()
    await mount.tracker.resume()
    assert all(attempt.closed_at is None for attempt in mount.attempts())
    in_time = mount.tracker._detector.due(clock.monotonic() + DEEPSPEED.quiet, mount.tracker._view)
    await mount.tracker._effects.carry_out(in_time)
    closed = [attempt for attempt in mount.attempts() if attempt.closed_at is not None]
    assert [attempt.generation for attempt in closed] == ["global_step1", "global_step2"]
    assert {attempt.signal for attempt in closed} == {"latest names it"}
    assert {attempt.run for attempt in closed} == {"kept" if moved else "run"}


@pytest.mark.parametrize("moved", [False, True])
async def test_a_deletion_that_a_kill_cut_short_leaves_no_complete_save(mount, moved):
    """Also if its directory was renamed in between: what is left of the save is not published. It is when the tracker
    names it once more, in the same life.
    """
    for number in (0, 1):
        await mount.write(f"run/global_step1/zero_pp_rank_{number}_mp_rank_00_model_states.pt", zipped(b"x"))
    await mount.write("run/latest", b"global_step1")
    lost = "run/global_step1/zero_pp_rank_1_mp_rank_00_model_states.pt"
    await mount.remove(lost)
    path = b"run/global_step1"
    if moved:
        await mount.rename("run", "kept")
        path = b"kept/global_step1"
    assert mount.attempts()[-1].torn
    mount.die()
    mount.start()
    await mount.tracker.resume()
    detector = mount.tracker._detector
    assert not detector.due(clock.monotonic() + 1000, mount.tracker._view)
    assert "removed after the close signal" in detector.open_saves()[path]
    assert mount.attempts()[-1].torn
    if not moved:
        await mount.write(lost, zipped(b"x"))
        assert [one.state for one in mount.attempts()] == [State.ABANDONED, State.OPEN]
        assert not mount.attempts()[-1].torn


async def test_a_marker_that_came_after_the_close_belongs_to_the_save_that_it_closes_also_after_a_kill(
    mount, monkeypatch
):
    await mount.write("run/step-5/weights.bin", b"x")
    await mount.tracker.close_now(b"run/step-5")

    async def never(*_arguments, **_options):
        await trio.sleep_forever()

    with monkeypatch.context() as patch:
        patch.setattr(Effects, "_pin", never)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.write, "run/step-5/model.safetensors.index.json", b'{"weight_map": {}}')
            with trio.fail_after(30):
                while len(mount.attempts()) == 1:
                    await mount.journal.wait_changed()
            nursery.cancel_scope.cancel()
    mount.die()
    mount.start()
    await mount.tracker.resume()
    assert mount.attempts()[-1].closed_at is not None


async def test_an_old_marker_that_is_moved_with_its_save_does_not_close_it_after_the_kill(mount):
    await mount.save("run/step-5", **{"0_0": b"one"})
    await mount.write("run/step-5/__0_0.distcp", b"half")
    await mount.rename("run/step-5", "run/step-6")
    mount.die()
    mount.start()
    await mount.tracker.resume()
    moved = mount.attempts()[-1]
    assert (moved.path, moved.state, moved.closed_at) == ("run/step-6", State.OPEN, None)


async def test_an_old_marker_does_not_close_the_save_that_was_open_at_the_kill(mount):
    await mount.save("run/step-5", **{"0_0": b"one"})
    await mount.write("run/step-5/__0_0.distcp", b"half")
    mount.die()
    mount.start()
    await mount.tracker.resume()
    _, again = mount.attempts()
    assert again.closed_at is None
    assert again.state is State.OPEN


def prove(*shards: str):
    """Return a journal write that says the store has these shards: their paths in the save."""

    def write(txn):
        for shard in txn.shards.scan():
            if shard.paths[0] in shards:
                txn.put_shard(msgspec.structs.replace(shard, pin=Pin("key", "version", 1, "sha")))

    return write


@pytest.mark.parametrize(
    ("journaled", "proved"),
    [(True, ()), (True, ("__0_0.distcp",)), (False, ())],
    ids=["closed", "closed, and one file is in the store", "its marker is there"],
)
async def test_a_save_that_was_not_synced_before_the_machine_stopped_is_abandoned(
    mount, journaled, proved, declared_warnings
):
    """Names and sizes may be there and the bytes not; that goes for a marker too."""
    if journaled:
        await mount.save("run/step-5", **{"0_0": b"one"})
    else:
        await mount.write("run/step-5/__0_0.distcp", b"one")
        (mount.staging.tree / "run/step-5/.metadata").write_bytes(metadata("0_0"))
    await mount.journal.write(prove(*proved))
    mount.die()
    mount.start("second boot")
    declared_warnings("save abandoned")
    await mount.tracker.resume()
    (attempt,) = mount.attempts()
    assert (attempt.state, attempt.error) == (State.ABANDONED, attempts.UNSYNCED)
    assert mount.tracker.open_saves() == {}
    if not journaled:
        assert mount.pinned(attempt) == {}
    await mount.save("run/step-5", **{"0_0": b"again"})
    _, again = mount.attempts()
    assert mount.pinned(again)["__0_0.distcp"] == b"again"


@pytest.mark.parametrize("state", [State.STAGED, State.OPEN], ids=["synced", "every file is in the store"])
async def test_a_save_whose_bytes_are_known_to_be_there_stands_after_the_machine_stopped(mount, state):
    await mount.save("run/step-5", **{"0_0": b"one"})
    (attempt,) = mount.attempts()
    if state is State.OPEN:
        await mount.journal.write(prove("__0_0.distcp", ".metadata"))
    else:
        await mount.journal.write(lambda txn: txn.update_attempt(attempt.attempt, state=state))
    mount.die()
    mount.start("second boot")
    await mount.tracker.resume()
    (after,) = mount.attempts()
    assert (after.state, after.error) == (state, "")


async def test_a_save_of_a_journal_without_boots_counts_as_one_of_another_boot(mount, declared_warnings):
    await mount.save("run/step-5", **{"0_0": b"one"})
    (attempt,) = mount.attempts()
    await mount.journal.write(lambda txn: txn.update_attempt(attempt.attempt, boot=""))
    mount.die()
    mount.start()
    declared_warnings("save abandoned")
    await mount.tracker.resume()
    assert mount.attempts()[0].state is State.ABANDONED


async def test_pins_that_no_record_names_are_swept_by_the_next_start(mount):
    await mount.write("run/step-5/__0_0.distcp", b"one")
    (attempt,) = mount.attempts()
    fd = os.open(mount.staging.tree / "run/step-5", os.O_RDONLY)
    mount.pins.add(attempt.attempt, "stray", fd, b"__0_0.distcp")
    mount.pins.add("nobody", "stray", fd, b"__0_0.distcp")
    os.close(fd)
    mount.die()
    mount.start()
    await mount.tracker.resume()
    assert mount.pins.attempts() == set()
