"""A save that another member closes: when it is closed here, when it waits, and when it must not be."""

from __future__ import annotations

import pytest

from cachefs.formats.records import AttemptRecord, State
from cachefs.link import CloseSave
from cachefs.staging.changes import Kind
from tests.generations.mounted import Mount

STEP = "run/global_step5"


def asked(attempt: AttemptRecord, *, quiet: float = 0.0) -> CloseSave:
    return CloseSave(attempt.path, attempt.attempt, "closed by node-0 (marker)", quiet)


async def test_it_is_closed_with_all_its_files(mount: Mount) -> None:
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    await mount.write(f"{STEP}/rank1.pt", b"one")
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(asked(attempt))
    (attempt,) = mount.attempts()
    assert attempt.signal == "closed by node-0 (marker)"
    assert attempt.closed_at is not None
    assert mount.pinned(attempt) == {"rank0.pt": b"zero", "rank1.pt": b"one"}
    await mount.tracker.close_from(asked(attempt))
    assert mount.attempts() == [attempt], "asking again changes nothing"


async def test_files_that_are_open_are_waited_for(mount: Mount) -> None:
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    file = mount.staging.tree / STEP / "rank1.pt"
    file.write_bytes(b"")
    await mount.report(Kind.CREATED, f"{STEP}/rank1.pt", writers=1)
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(asked(attempt))
    assert mount.attempts()[0].closed_at is None
    file.write_bytes(b"one")
    await mount.report(Kind.CLOSED, f"{STEP}/rank1.pt")
    (attempt,) = mount.attempts()
    assert mount.pinned(attempt) == {"rank0.pt": b"zero", "rank1.pt": b"one"}


async def test_after_a_weak_signal_it_must_be_quiet(mount: Mount) -> None:
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(asked(attempt, quiet=3600.0))
    assert mount.attempts()[0].closed_at is None
    await mount.tracker.close_from(asked(attempt, quiet=0.0))
    assert mount.attempts()[0].closed_at is not None


async def test_files_that_were_written_again_may_be_those_of_the_next_save(mount: Mount) -> None:
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    await mount.write(f"{STEP}/rank0.pt", b"next")
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(asked(attempt))
    (ended,) = mount.attempts()
    assert ended.state is State.ABANDONED
    assert "written again" in ended.error
    await mount.write(f"{STEP}/rank0.pt", b"third")
    assert len(mount.attempts()) == 2, "the next change opens another save"


async def test_a_temporary_name_may_be_used_for_one_file_after_the_other(mount: Mount) -> None:
    for name in ("rank0.pt", "rank1.pt"):
        await mount.write(f"{STEP}/write.tmp", name.encode())
        await mount.rename(f"{STEP}/write.tmp", f"{STEP}/{name}")
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(asked(attempt))
    assert mount.pinned(mount.attempts()[0]) == {"rank0.pt": b"rank0.pt", "rank1.pt": b"rank1.pt"}


@pytest.mark.parametrize("how", ["rename", "remove"])
async def test_a_file_that_another_takes_the_place_of_was_written_again(mount: Mount, how: str) -> None:
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    if how == "rename":
        await mount.write(f"{STEP}/rank0.tmp", b"next")
        await mount.rename(f"{STEP}/rank0.tmp", f"{STEP}/rank0.pt")
    else:
        await mount.remove(f"{STEP}/rank0.pt")
        await mount.write(f"{STEP}/rank0.pt", b"next")
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(asked(attempt))
    assert mount.attempts()[0].state is State.ABANDONED


async def test_a_save_that_a_restart_took_up(mount: Mount) -> None:
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    mount.die()
    mount.start()
    await mount.tracker.resume()
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(asked(attempt))
    assert mount.attempts()[0].closed_at is not None


async def test_another_save_of_the_name_is_not_closed(mount: Mount) -> None:
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    (attempt,) = mount.attempts()
    await mount.tracker.close_from(CloseSave(attempt.path, "another", "closed by node-0", 0.0))
    assert mount.attempts() == [attempt]


async def test_a_save_that_was_ended_elsewhere_is_let_go(mount: Mount) -> None:
    """The engine abandons an attempt: what is written next is another save."""
    await mount.write(f"{STEP}/rank0.pt", b"zero")
    (attempt,) = mount.attempts()
    mount.tracker.forget_ended()
    await mount.write(f"{STEP}/rank1.pt", b"one")
    assert len(mount.attempts()) == 1
    mount.journal.write_now(
        lambda txn: txn.update_attempt(attempt.attempt, state=State.ABANDONED, error="a member is missing")
    )
    mount.tracker.forget_ended()
    assert mount.tracker.open_saves() == {}
    await mount.write(f"{STEP}/rank0.pt", b"again")
    first, second = mount.attempts()
    assert (first.state, second.state) == (State.ABANDONED, State.OPEN)
