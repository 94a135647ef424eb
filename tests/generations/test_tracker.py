"""The tracker on a real journal and real pins: what is journaled when, and what a restart takes up."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
import trio

from cachefs import clock
from cachefs.errors import CachefsError, NotFoundError, StagingError
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Pin
from cachefs.formats.records import AttemptRecord, State
from cachefs.generations import attempts, releaser, retrying
from cachefs.generations.actions import CloseSave
from cachefs.generations.catalog import AUTO, DEEPSPEED
from cachefs.generations.closing import Closer
from cachefs.generations.detector import Detector
from cachefs.generations.effects import Effects
from cachefs.generations.placement import Placer
from cachefs.generations.releaser import Releaser
from cachefs.generations.tracked import Hints
from cachefs.generations.tracker import Tracker
from cachefs.journal import Journal
from cachefs.staging.changes import Change, Kind
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins
from cachefs.waiting import each
from tests.generations.fake_torch import metadata_pickle


def zipped(text: bytes) -> bytes:
    """Return a small zip, as torch.save writes one."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data", text)
    return out.getvalue()


def metadata(*names: str) -> bytes:
    """Return a `.metadata` that lists shards."""
    return metadata_pickle([f"__{name}.distcp" for name in names])


class Mount:
    """Stands in for the mount: changes the tree and reports it, as mount/ does."""

    def __init__(self, root) -> None:
        self.stack = ExitStack()
        self.root = root
        self.start()

    def start(self, boot: str = "first boot") -> None:
        """Start, or start again after `die`."""
        self.staging = Staging(self.root)
        self.stack.callback(self.staging.close)
        self.journal = Journal(self.staging.journal)
        self.stack.callback(self.journal.close)
        self.pins = Pins(self.staging)
        self.hints: list[object] = []
        self.releaser = Releaser(self.journal, self.pins)
        placer = Placer(AUTO)
        self.tracker = Tracker(
            self.journal,
            self.pins,
            self.staging.tree_fd,
            Detector(placer),
            placer,
            Keys(),
            member="node",
            boot=boot,
            early_delay=0.0,
            hints=Hints(
                opened=lambda: self.hints.append("opened"),
                closed=lambda: self.hints.append("closed"),
                pinned=lambda: self.hints.append("pinned"),
                loose=self.hints.append,
            ),
        )

    def die(self) -> None:
        """Stop without a word, as kill -9 does."""
        self.stack.close()

    async def report(self, kind: Kind, path: str, **facts) -> None:
        waiting = self.tracker.after(Change(kind, path.encode(), **facts))
        if waiting is not None:
            await waiting

    async def held(self, kind: Kind, path: str) -> None:
        while (waiting := self.tracker.before(Change(kind, path.encode()))) is not None:
            await waiting

    async def write(self, path: str, data: bytes) -> None:
        file = self.staging.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = Kind.TRUNCATED if file.exists() else Kind.CREATED
        await self.held(kind, path)
        if kind is Kind.TRUNCATED:
            file.unlink()  # as the mount does with a pinned file: a fresh inode
        file.write_bytes(b"")
        await self.report(kind, path, writers=1)
        file.write_bytes(data)
        await self.report(Kind.CLOSED, path)

    async def rename(self, old: str, new: str) -> None:
        is_dir = (self.staging.tree / old).is_dir()
        os.rename(self.staging.tree / old, self.staging.tree / new)
        await self.report(Kind.RENAMED, new, old=old.encode(), is_dir=is_dir)

    async def remove(self, path: str) -> None:
        (self.staging.tree / path).unlink()
        await self.report(Kind.REMOVED, path)

    async def save(self, directory: str, **files: bytes) -> None:
        """Save as DCP does; the last rename closes."""
        for name, data in files.items():
            await self.write(f"{directory}/__{name}.distcp", data)
        await self.write(f"{directory}/.metadata.tmp", metadata(*files))
        await self.rename(f"{directory}/.metadata.tmp", f"{directory}/.metadata")

    def attempts(self) -> list[AttemptRecord]:
        with self.journal.read() as txn:
            return sorted(txn.attempts.scan(), key=lambda record: record.serial)

    def recorded(self, attempt: AttemptRecord) -> bool:
        """Return whether the journal has a shard of an attempt."""
        with self.journal.read() as txn:
            return bool(txn.shards_of(attempt.attempt))

    def pinned(self, attempt: AttemptRecord) -> dict[str, bytes]:
        """Return what is pinned, by the paths of the shard records."""
        with self.journal.read() as txn:
            shards = txn.shards_of(attempt.attempt)
        assert {shard.shard for shard in shards} == self.pins.shards(attempt.attempt)
        return {
            path: self.pins.path(attempt.attempt, shard.shard).read_bytes() for shard in shards for path in shard.paths
        }


def publish_all(txn):
    """Leave the journal as it is when every attempt has been published."""
    for attempt in txn.attempts.scan():
        for shard in txn.shards_of(attempt.attempt):
            txn.drop_shard(shard)
        txn.update_attempt(attempt.attempt, state=State.PUBLISHED)


@pytest.fixture
def mount(tmp_path):
    made = Mount(tmp_path / "staging")
    yield made
    made.die()


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


async def test_a_tracker_is_written_although_the_journal_fails(mount, monkeypatch):
    await mount.write("run/global_step1/mp_rank_00_model_states.pt", zipped(b"x"))
    disk = Full(mount, monkeypatch)
    disk.full = True
    await mount.write("run/latest", b"global_step1")
    assert mount.attempts()[0].signals == {}
    disk.full = False
    await mount.tracker._catch_up()
    assert mount.attempts()[0].signals == {"deepspeed": "latest names it"}


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


class Full:
    """Makes the journal refuse what is written while `full` is set."""

    def __init__(self, mount: Mount, monkeypatch) -> None:
        self.full = False
        self.refused = trio.Event()
        write = mount.journal.write

        async def refuse(fn):
            await trio.lowlevel.checkpoint()
            if self.full:
                self.refused.set()
                raise StagingError("the journal cannot be written: disk full")
            return await write(fn)

        monkeypatch.setattr(mount.journal, "write", refuse)
        monkeypatch.setattr(retrying, "FIRST", 0.01)

    async def refuses(self) -> None:
        """Wait until a write is refused."""
        self.refused = trio.Event()
        with trio.fail_after(30):
            await self.refused.wait()


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


async def test_a_record_is_not_forgotten_before_its_pins_are_dropped(mount, monkeypatch):
    monkeypatch.setattr(attempts, "HISTORY", 1)
    for step in range(3):
        await mount.save(f"run/step-{step}", **{"0_0": b"one"})

    await mount.journal.write(publish_all)
    mount.pins.drop_attempt(mount.attempts()[0].attempt)
    mount.pins.drop_attempt(mount.attempts()[2].attempt)
    await mount.journal.write(lambda txn: attempts.forget(txn, mount.pins))
    assert [attempt.step for attempt in mount.attempts()] == [1, 2]


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
