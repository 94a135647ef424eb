"""Files that the disk has lost, and files that cannot be read just now: each costs its own save, at most."""

from __future__ import annotations

import errno
import os

import pytest
import trio

from cachefs.errors import CorruptError, UnreadableError
from cachefs.formats.records import State
from cachefs.generations import effects, retrying
from cachefs.generations.tracked import Hints
from cachefs.generations.view import FileSource, TreeView
from cachefs.staging.changes import Kind
from tests.generations.mounted import Full, metadata, zipped
from tests.generations.world import TENSORS, ZIP, World


class Failing:
    """Makes a call of `os` fail, the given number of times, for files whose names hold `name`."""

    def __init__(self, monkeypatch, call: str, number: int, *, name: str = "", times: int = 1 << 30) -> None:
        self.left = times
        original = getattr(os, call)

        def fail(target, *arguments, **options):
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fsdecode(target)
            if self.left and name in path:
                self.left -= 1
                raise OSError(number, os.strerror(number), path)
            return original(target, *arguments, **options)

        monkeypatch.setattr(os, call, fail)

    def cure(self) -> None:
        self.left = 0


# ---- what is read


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("pread", errno.EIO, CorruptError),
        ("pread", errno.EUCLEAN, CorruptError),
        ("open", errno.EIO, CorruptError),
        ("open", errno.EMFILE, UnreadableError),
        ("pread", errno.ENOMEM, UnreadableError),
    ],
)
def test_what_cannot_be_read_names_the_file_and_says_whether_it_may_be_later(
    tmp_path, monkeypatch, call, number, error
):
    (tmp_path / "m.pt").write_bytes(b"bytes")
    Failing(monkeypatch, call, number, name="m.pt")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(error, match=f"m.pt cannot be read: {os.strerror(number)}"):
            TreeView(fd).source(b"m.pt").read(0, 5)
    finally:
        os.close(fd)


def test_of_a_file_that_is_gone_nothing_is_read(tmp_path):
    assert FileSource(os.fsencode(tmp_path / "gone"), None, 5).read(0, 5) == b""


def test_a_look_at_a_file_leaves_its_access_time_alone(tmp_path):
    """The training may have set it by then."""
    path, long_ago = tmp_path / "x.pt", 1_500_000_000_000_000_123
    path.write_bytes(b"x" * 10)
    os.utime(path, ns=(long_ago, long_ago))
    assert FileSource(os.fsencode(path), None, 10).read(0, 5) == b"xxxxx"
    assert path.stat().st_atime_ns == long_ago


# ---- what the detector makes of it

LATER, LOST = UnreadableError("no descriptor"), CorruptError("a bad block")


def test_a_single_file_that_could_not_be_read_closes_once_it_can():
    world = World()
    world.unreadable[b"run/model.safetensors"] = LATER
    world.put("run/model.safetensors", TENSORS)
    world.wait(60)
    assert (world.closes, world.incomplete) == ([], [])
    assert world.detector.open_saves() == {b"run/model.safetensors": "no descriptor"}
    del world.unreadable[b"run/model.safetensors"]
    world.wait(2)
    assert [path for path, _, _ in world.closes] == ["run/model.safetensors"]


def test_a_single_file_that_is_lost_is_told_and_closes_when_it_is_written_again():
    world = World()
    world.unreadable[b"run/model.safetensors"] = LOST
    world.put("run/model.safetensors", TENSORS)
    assert (world.closes, world.incomplete) == ([], ["run/model.safetensors"])
    del world.unreadable[b"run/model.safetensors"]
    world.wait(60)
    assert world.closes == []
    world.put("run/model.safetensors", TENSORS)
    assert [path for path, _, _ in world.closes] == ["run/model.safetensors"]


def test_a_file_that_could_not_be_read_and_is_written_again_is_not_looked_at_before_it_is_closed():
    world = World()
    world.unreadable[b"run/model.pt"] = LATER
    world.put("run/model.pt", ZIP)
    world.unreadable.clear()
    with_writer = world.reopen("run/model.pt")
    world.wait(60)
    assert world.closes == []
    with_writer.close()
    assert [path for path, _, _ in world.closes] == ["run/model.pt"]


@pytest.mark.parametrize("error", [LATER, LOST], ids=["now", "for good"])
def test_a_tracker_that_cannot_be_read_names_no_save(error):
    """It is looked at again when it may be read later, and told of when it is lost."""
    world = World()
    world.unreadable[b"run/latest"] = error
    world.put("run/global_step5/mp_rank_00_model_states.pt", ZIP)
    world.put("run/latest", b"global_step5")
    world.wait(600)
    assert world.closes == []
    assert world.incomplete == (["run/global_step5"] if error is LOST else [])
    world.unreadable.clear()
    world.wait(600)
    assert [path for path, _, _ in world.closes] == ([] if error is LOST else ["run/global_step5"])


@pytest.mark.parametrize("error", [LATER, LOST], ids=["now", "for good"])
def test_a_marker_that_cannot_be_read_does_not_close_its_save(error):
    world = World()
    world.unreadable[b"run/checkpoint-5/trainer_state.json"] = error
    world.put("run/checkpoint-5/model.safetensors", TENSORS)
    world.put("run/checkpoint-5/trainer_state.json", b"{}")
    world.wait(600)
    assert world.closes == []
    assert str(error) in world.detector.open_saves()[b"run/checkpoint-5"]
    world.unreadable.clear()
    world.wait(600)
    assert [path for path, _, _ in world.closes] == ([] if error is LOST else ["run/checkpoint-5"])


# ---- what the tasks make of it


async def test_a_lost_file_is_shown_and_the_next_start_takes_up_all_other_saves(mount, monkeypatch, declared_warnings):
    declared_warnings("will not be published .*lost.pt cannot be read")
    Failing(monkeypatch, "pread", errno.EIO, name="lost.pt")
    await mount.write("run/lost.pt", zipped(b"x"))
    (mount.staging.tree / "run/good.pt").write_bytes(b"")
    await mount.report(Kind.CREATED, "run/good.pt", writers=1)
    (mount.staging.tree / "run/good.pt").write_bytes(zipped(b"x"))
    mount.die()
    mount.start()
    await mount.tracker.resume()
    lost, good = mount.attempts()
    assert lost.closed_at is None
    assert "lost.pt cannot be read" in lost.error
    assert good.closed_at is not None


async def test_early_uploads_survive_a_lost_file(mount, monkeypatch, nursery):
    Failing(monkeypatch, "pread", errno.EIO, name="lost.safetensors")
    await nursery.start(mount.tracker.early.run)
    await mount.write("run/step-5/lost.safetensors", b"x")
    await mount.write("run/step-5/__0_0.distcp", b"one")
    (attempt,) = mount.attempts()
    with trio.fail_after(30):
        while not mount.recorded(attempt):
            await mount.journal.wait_changed()
    assert mount.pinned(attempt) == {"__0_0.distcp": b"one"}


async def test_an_early_upload_without_descriptors_begins_later(mount, monkeypatch, nursery, declared_warnings):
    declared_warnings("early upload failed")
    monkeypatch.setattr(retrying, "LAST", 0.01)
    failing = Failing(monkeypatch, "open", errno.EMFILE, name="model.safetensors", times=1)
    await nursery.start(mount.tracker.early.run)
    await mount.write("run/step-5/model.safetensors", TENSORS)
    (attempt,) = mount.attempts()
    with trio.fail_after(30):
        while not mount.recorded(attempt):
            await mount.journal.wait_changed()
    assert failing.left == 0
    assert mount.pinned(attempt) == {"model.safetensors": TENSORS}


async def test_pins_that_cannot_be_dropped_are_dropped_later(mount, monkeypatch, declared_warnings):
    declared_warnings("forgetting old saves failed")
    monkeypatch.setattr(retrying, "FIRST", 0.01)
    for step in (1, 2):
        await mount.save(f"run/step-{step}", **{"0_0": b"one"})
    one, two = mount.attempts()

    def over(txn):
        for attempt in (one, two):
            for shard in txn.shards_of(attempt.attempt):
                txn.drop_shard(shard)
            txn.update_attempt(attempt.attempt, state=State.PUBLISHED)

    await mount.journal.write(over)
    failing = Failing(monkeypatch, "listdir", errno.EMFILE, name=one.attempt, times=2)
    await retrying.persist(mount.releaser._release, "forgetting old saves")
    assert failing.left == 0
    assert mount.pins.attempts() == set()


async def test_the_end_of_a_save_whose_pins_cannot_be_dropped_is_no_error_of_who_removed_it(
    mount,
    monkeypatch,
    declared_warnings,
):
    declared_warnings("the pins of an ended save are dropped later")
    told = []
    hints = mount.tracker._effects._hints
    monkeypatch.setattr(
        mount.tracker._effects,
        "_hints",
        Hints(hints.opened, hints.closed, hints.pinned, hints.loose, lambda: told.append("over")),
    )
    await mount.write("run/step-5/__0_0.distcp", b"x")
    (attempt,) = mount.attempts()
    Failing(monkeypatch, "listdir", errno.EMFILE, name=attempt.attempt)
    (mount.staging.tree / "run/step-5/__0_0.distcp").unlink()
    (mount.staging.tree / "run/step-5").rmdir()
    await mount.report(Kind.REMOVED, "run/step-5/__0_0.distcp")
    await mount.report(Kind.REMOVED, "run/step-5", is_dir=True)
    assert mount.attempts()[0].state is State.ABANDONED
    assert told == ["over"]


class FailingLinks:
    """Makes pins of files with a name fail, the given number of times."""

    def __init__(self, monkeypatch, number: int, name: bytes, times: int = 1 << 30) -> None:
        self.left = times
        original = os.link

        def fail(source, target, **options):
            if self.left and source == name:
                self.left -= 1
                raise OSError(number, os.strerror(number))
            original(source, target, **options)

        monkeypatch.setattr(os, "link", fail)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EDQUOT])
async def test_a_save_that_cannot_be_pinned_just_now_is_closed_later(mount, monkeypatch, number, declared_warnings):
    declared_warnings("closing waits")
    monkeypatch.setattr(effects, "AGAIN", 0.01)
    FailingLinks(monkeypatch, number, b"__1_0.distcp", times=2)
    await mount.save("run/step-5", **{"0_0": b"one", "1_0": b"two"})
    (attempt,) = mount.attempts()
    assert (attempt.state, attempt.error) == (State.OPEN, "")
    assert attempt.closed_at is not None
    assert mount.pinned(attempt).keys() == {"__0_0.distcp", "__1_0.distcp", ".metadata"}


@pytest.mark.parametrize(
    ("number", "patience"), [(errno.EIO, 60.0), (errno.ENOENT, 60.0), (errno.EMFILE, 0.0)], ids=["lost", "gone", "late"]
)
async def test_a_save_that_cannot_be_pinned_is_abandoned(mount, monkeypatch, number, patience, declared_warnings):
    declared_warnings("save abandoned .*could not be pinned")
    monkeypatch.setattr(effects, "PATIENCE", patience)
    FailingLinks(monkeypatch, number, b"__1_0.distcp")
    await mount.save("run/step-5", **{"0_0": b"one", "1_0": b"two"})
    (attempt,) = mount.attempts()
    assert attempt.state is State.ABANDONED
    assert os.strerror(number) in attempt.error
    assert mount.pinned(attempt) == {}


async def test_a_full_disk_that_takes_neither_pins_nor_records_still_closes_the_save_later(
    mount,
    monkeypatch,
    declared_warnings,
):
    declared_warnings("closing waits")
    disk = Full(mount, monkeypatch)
    await mount.write("run/step-5/__0_0.distcp", b"one")
    await mount.write("run/step-5/.metadata.tmp", metadata("0_0"))
    monkeypatch.setattr(effects, "AGAIN", 0.01)
    FailingLinks(monkeypatch, errno.EDQUOT, b"__0_0.distcp", times=1)

    async def free(monkeypatch):
        await disk.refuses()
        disk.full = False

    disk.full = True
    declared_warnings("early uploads are not used")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(free, monkeypatch)
        await mount.rename("run/step-5/.metadata.tmp", "run/step-5/.metadata")
    assert mount.attempts()[0].closed_at is not None


async def test_a_directory_that_cannot_be_read_is_not_left_out_of_a_save(mount, monkeypatch, declared_warnings):
    declared_warnings("save abandoned")
    await mount.write("run/step-5/sub/vocab.json", b"one")
    Failing(monkeypatch, "open", errno.EIO, name="sub")
    await mount.save("run/step-5", **{"1_0": b"two"})
    (attempt,) = mount.attempts()
    assert attempt.state is State.ABANDONED
