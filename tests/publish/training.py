"""The training of a simulated world, and what the mount of each node makes of its writes (generations/tracker.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from cachefs import clock
from cachefs.formats.records import AttemptRecord, Identity, ShardRecord, State
from cachefs.generations.attempts import written_again
from cachefs.generations.stager import _supersede
from cachefs.journal import Txn
from cachefs.publish.members import CloseAsked
from cachefs.publish.sealing import CLOSED_BY
from tests.publish.judge import Judge, content
from tests.publish.judge import Save as Truth
from tests.publish.stage import RUN

if TYPE_CHECKING:
    from tests.publish.simulation import SimNode, World


@dataclass(frozen=True)
class Save:
    """What the training saves next. `writers` and `marker` are indexes of members; `gap` seconds pass before it."""

    generation: str
    step: int
    writers: tuple[int, ...]
    marker: int
    gap: float = 5.0
    files: int = 2


class Died(Exception):
    """A node of the training is gone, and so is the training: it starts again when all are there."""


@dataclass
class _Tracked:
    attempt: str
    stale: bool = False
    shards: dict[str, str] = field(default_factory=dict)
    """By path: the shard id."""
    written: set[str] = field(default_factory=set)
    """The paths written since the save was opened; others were in the directory before."""
    rewritten: bool = False


class Mount:
    """What one node's mount process knows of its saves; gone when the node dies."""

    def __init__(self, node: SimNode, judge: Judge) -> None:
        self.node = node
        self.judge = judge
        self.saves: dict[str, _Tracked] = {}
        self.closed: dict[str, set[str]] = {}
        self.left: dict[str, dict[str, bytes]] = {}
        """By generation: what a save that was ended before it closed has left in its directory."""
        with node.journal.read() as txn:
            for record in txn.attempts.scan():
                if not record.foreign and not record.state.final and record.closed_at is None:
                    shards = {shard.paths[0]: shard.shard for shard in txn.shards_of(record.attempt)}
                    self.saves[record.generation] = _Tracked(
                        record.attempt, True, shards, set(shards), record.rewritten
                    )

    def write(self, save: Save, path: str, body: bytes) -> None:
        """A file is written and closed."""
        tracked = self._open(save.generation)
        if tracked is None:
            if path not in self.closed.get(save.generation, {path}):
                return  # a new file in a closed save is none of its files
            tracked = self._begin(save)
        if path in tracked.written:
            tracked.rewritten = True
            self.node.journal.write_now(partial(written_again, attempt=tracked.attempt))
        tracked.written.add(path)
        self._pin(tracked, path, body)

    def _pin(self, tracked: _Tracked, path: str, body: bytes) -> None:
        shard = clock.new_id()[-16:]
        self.node.write_file(tracked.attempt, shard, path, body, tracked.shards.get(path))
        tracked.shards[path] = shard
        self.judge.files.setdefault(tracked.attempt, {})[path] = body

    def _open(self, generation: str) -> _Tracked | None:
        tracked = self.saves.get(generation)
        if tracked is not None:
            with self.node.journal.read() as txn:
                record = txn.attempts.get(tracked.attempt)
            if record is not None and not record.state.final and not tracked.stale:
                return tracked
            if tracked.stale:
                self.node.end(tracked.attempt, "superseded: written again after a restart", cancelled=True)
            del self.saves[generation]
            self.left[generation] = dict(self.judge.files.get(tracked.attempt, {}))
        return None

    def _begin(self, save: Save) -> _Tracked:
        self.closed.pop(save.generation, None)
        tracked = self.saves[save.generation] = _Tracked(clock.new_id())
        self.node.begin(tracked.attempt, save)
        for path, body in self.left.pop(save.generation, {}).items():
            self._pin(tracked, path, body)  # a close takes what is in the directory
        return tracked

    def close(self, generation: str, signal: str) -> None:
        """The close signal of a save appears here."""
        tracked = self.saves.get(generation)
        if tracked is not None:
            self.saves.pop(generation)
            self.closed[generation] = set(tracked.shards)
            self.node.mark(tracked.attempt, signal, rewritten=tracked.rewritten)

    def asked(self, close: CloseAsked) -> None:
        """Another member has closed the save (Tracker.close_from)."""
        generation = close.save.generation
        tracked = self.saves.get(generation)
        if tracked is None or tracked.attempt != close.save.attempt:
            return
        if tracked.rewritten:
            del self.saves[generation]
            self.left[generation] = dict(self.judge.files.get(tracked.attempt, {}))
            self.node.end(tracked.attempt, "files of it were written again")
        else:
            self.close(generation, f"{CLOSED_BY}{close.close.member}")


async def train(world: World, saves: tuple[Save, ...]) -> None:
    """Make the saves one after the other."""
    for save in saves:
        await trio.sleep(save.gap)
        await world.ready()
        try:
            await make(world, save)
        except Died:
            world.deaths += 1


async def make(world: World, save: Save) -> Truth:
    """Make one save: every writer its part, then a barrier, then the marker."""
    members = world.members
    writers = {members[index % len(members)] for index in save.writers}
    earlier = [one for one in world.judge.saves.values() if one.generation == save.generation]
    if earlier and not earlier[-1].marked:
        # What the last, unfinished save left must be written over.
        writers |= set(earlier[-1].parts)
    # A directory that is written again with fewer files keeps the others, and they are published with it, on one node
    # as on several: no later save of a name has fewer.
    save = replace(save, files=max(save.files, *(count for one in earlier for count in one.parts.values()), 0))
    number = len(world.judge.saves) + 1
    truth = world.judge.saves[number] = Truth(number, save.generation, dict.fromkeys(sorted(writers), save.files))
    lives = {name: world.nodes[name].mount for name in members}
    lost = world.disks_lost
    async with _unpacked(trio.open_nursery()) as nursery:
        for name in sorted(writers):
            nursery.start_soon(_write_part, world, save, number, name, lives[name])
    await trio.sleep(world.chance.uniform(0.0, 1.0))
    marker = members[save.marker % len(members)]
    marker = marker if marker in writers else min(writers)
    if world.disks_lost != lost:
        raise Died
    truth.marked = True
    await _on(world, marker, lives[marker], lambda mount: mount.close(save.generation, "marker"))
    return truth


class _unpacked:
    """Raises the one error of a nursery as it is."""

    def __init__(self, manager: trio._core._run.NurseryManager) -> None:
        self._manager = manager

    async def __aenter__(self) -> trio.Nursery:
        return await self._manager.__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._manager.__aexit__(*exc)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            if group.split(Died)[1] is None:
                raise Died from None
            raise


async def _write_part(world: World, save: Save, number: int, name: str, life: Mount) -> None:
    for file in range(save.files):
        await trio.sleep(world.chance.choice((0.0, 0.5, 3.0)))
        body = content(name, number, file)
        await _on(world, name, life, partial(Mount.write, save=save, path=f"{name}-{file}", body=body))


async def _on(world: World, name: str, life: Mount, act: Callable[[Mount], None]) -> None:
    """Do something in a node's mount, when it is not stopped; it must still be the one the training began with."""
    await world.nodes[name].awake()
    node = world.nodes[name]
    if node.mount is not life or node.down:
        raise Died
    with node.here():
        act(life)


def superseding(txn: Txn, attempt: str, size: int, signal: str, rewritten: bool) -> list[str]:
    """Close a save in the journal, as the stager leaves it; return older saves that gave way to it."""
    record = txn.attempts.get(attempt)
    if record is None or record.closed_at is not None or record.state.final:
        return []
    changes = {"signal": signal, "strength": "A", "size": size, "rewritten": rewritten}
    record = txn.update_attempt(attempt, closed_at=clock.now(), state=State.STAGED, **changes)
    return _supersede(txn, record)


def opened(save: Save, attempt: str, serial: int) -> AttemptRecord:
    """Return the record of a new save."""
    return AttemptRecord(
        attempt=attempt,
        path=f"{RUN}/{save.generation}",
        run=RUN,
        generation=save.generation,
        kind="directory",
        preset="auto",
        step=save.step,
        opened_at=clock.now(),
        serial=serial,
    )


def shard_record(attempt: str, shard: str, path: str, size: int, ino: int) -> ShardRecord:
    """Return the record of a pinned file; its key is made when it is sent."""
    identity = Identity(ino=ino, size=size, mtime_ns=1)
    return ShardRecord(attempt=attempt, shard=shard, paths=(path,), identity=identity, mode=0o640, key="")
