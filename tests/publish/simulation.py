"""A simulated world: members on their nodes, an owner, a store behind a bad network, and a training.

Everything below the mount is the real thing: journals, pins, looks, joining, the publisher, the rules. What happens is
a Scenario and a seed; the same two give the same world.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import lmdb
import msgspec
import trio

from cachefs import journal
from cachefs.errors import StoreError
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Pin
from cachefs.formats.records import AttemptRecord, ShardRecord, State
from cachefs.journal import Txn
from cachefs.publish import sharing
from cachefs.publish.members import CloseAsked
from cachefs.publish.ownership import Ownership
from cachefs.publish.settings import Settings
from cachefs.publish.steps import update
from cachefs.store import createonly
from tests.publish import virtual
from tests.publish.cluster import InlineJournal, Node, records
from tests.publish.judge import Judge, Violation
from tests.publish.network import Network, ProcessHop, Rates, View
from tests.publish.stage import RUN
from tests.publish.training import Mount, Save, make, opened, shard_record, superseding, train

T = TypeVar("T")
LIFE = 1800.0
"""Seconds after which a training ends that has come to a stand, because nobody brings its nodes back."""
PATIENCE = 900.0
"""Seconds of a calm world within which everything must come to an end."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a node `at` a time: what is one of

    engine    its engine dies and starts again
    node      the node dies and is there again after `seconds`
    disk      the same, with an empty disk
    pause     its processes are stopped for `seconds`
    cut       it has no network for `seconds`
    owner     it is started as the owner; the one there was does not know
    clock     its wall clock moves by `seconds` times 100
    damage    its part of a save that is still written is lost
    """

    at: float
    what: str
    node: int
    seconds: float = 20.0


QUIET = Rates()


@dataclass(frozen=True)
class Scenario:
    """What happens in a world. `named`: the members know each other's names, else only how many they are. The owner is
    a member, or with `promoter` a node of its own.
    """

    saves: tuple[Save, ...]
    events: tuple[Event, ...] = ()
    rates: Rates = QUIET
    members: int = 3
    named: bool = True
    promoter: bool = False
    seed: int = 0


class SimJournal(InlineJournal):
    """A journal in whose commits the process may die, and whose records the judge sees."""

    node: SimNode

    async def write(self, fn: Callable[[Txn], T]) -> T:
        await self.node.awake()
        await self.node.hop.perhaps_die()
        result = await super().write(fn)
        await self.node.hop.perhaps_die()
        await self.node.awake()
        return result

    def write_now(self, fn: Callable[[Txn], T]) -> T:
        result = super().write_now(fn)
        self.node.judge_records()
        return result


class SimNode(Node):
    """One process of a node; `mount` and `incarnation` outlive it when the engine alone dies."""

    journal_type = SimJournal
    hop: ProcessHop  # type: ignore[assignment]

    def __init__(self, world: World, name: str, settings: Settings, *, after: SimNode | None = None) -> None:
        self.world = world
        self.view = View(world.judge.store)
        super().__init__(world.root, self.view, name=name, keys=Keys())
        self.journal.node = self  # type: ignore[attr-defined]
        self.settings = settings
        self.hop = ProcessHop(world.network, name, self.view, self.awake, partial(world.kill_soon, self))
        self.down = False
        self.incarnation = after.incarnation if after else f"{name}-{world.chance.getrandbits(64):016x}"
        self.started = after.started if after else super().newest()
        self.mount = after.mount if after else Mount(self, world.judge)
        self.mount.node = self

    def newest(self) -> int:
        return self.started

    def ownership(self, **given: Any) -> Ownership:
        return super().ownership(**given | {"incarnation": self.incarnation})

    async def awake(self) -> None:
        """Return when the node's processes are not stopped."""
        while (event := self.world.paused.get(self.name)) is not None:
            await event.wait()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Do something on this node: its clocks are asked."""
        token = virtual.NODE.set(self.name)
        try:
            yield
        finally:
            virtual.NODE.reset(token)

    def judge_records(self) -> None:
        for record in records(self):
            self.world.judge.watch(self.world.judge.journaled, self.name, record)

    async def live(self, **given: Any) -> None:
        virtual.NODE.set(self.name)
        await super().live(**given)

    # what the mount does

    def asked(self, close: CloseAsked) -> None:
        self.mount.asked(close)

    def begin(self, attempt: str, save: Save) -> None:
        """Journal a new save."""
        self.journal.write_now(lambda txn: txn.attempts.put(attempt, opened(save, attempt, txn.next_serial())))
        self.journal.note_commit()

    def write_file(self, attempt: str, shard: str, path: str, body: bytes, old: str | None) -> None:
        """Pin a file that was written, in place of the shard `old`."""
        staged = self.staging.tree / attempt / path
        staged.parent.mkdir(parents=True, exist_ok=True)
        staged.unlink(missing_ok=True)
        staged.write_bytes(body)
        fd = os.open(staged.parent, os.O_RDONLY)
        try:
            stat = self.pins.add(attempt, shard, fd, os.fsencode(path))
        finally:
            os.close(fd)

        def put(txn: Txn) -> None:
            before = txn.shard(attempt, old) if old else None
            if before is not None:
                txn.drop_shard(before)
            txn.put_shard(shard_record(attempt, shard, path, len(body), stat.st_ino))

        self.journal.write_now(put)
        if old is not None:
            self.pins.drop(attempt, old)

    def end(self, attempt: str, reason: str, *, cancelled: bool = False) -> None:
        """End an open save; `cancelled`: the training has dropped it."""
        over = {"state": State.ABANDONED, "error": reason, "cancelled": cancelled}
        self.journal.write_now(lambda txn: update(txn, attempt, **over))
        self.journal.note_commit()

    def mark(  # type: ignore[override]
        self, attempt: str, signal: str = "marker", strength: str = "A", *, rewritten: bool = False
    ) -> None:
        with self.journal.read() as txn:
            size = sum(shard.identity.size for shard in txn.shards_of(attempt))
        close = partial(superseding, attempt=attempt, size=size, signal=signal, rewritten=rewritten)
        for older in self.journal.write_now(close):
            self.pins.drop_attempt(older)
        self.journal.note_commit()

    # what the flusher does

    async def _flush(self) -> None:
        while True:
            for record in records(self):
                if record.state is State.STAGED and record.opened_epoch is not None:
                    try:
                        await self._send(record)
                    except StoreError:
                        pass
            await trio.sleep(1)

    async def _send(self, record: AttemptRecord) -> None:
        for shard in self.shards(record.attempt):
            if shard.pin is None:
                sent = await self._send_shard(record, shard)
                await self.journal.write(partial(_put_shard, sent))
        await self.journal.write(lambda txn: _flushed(txn, record.attempt))

    async def _send_shard(self, record: AttemptRecord, shard: ShardRecord) -> ShardRecord:
        data = self.pins.path(shard.attempt, shard.shard).read_bytes()
        key = self.keys.shard(record.run, record.key, self.name, shard.shard, shard.paths[0])
        digest = hashlib.sha256(data).digest()
        info = await createonly.create_only(self.view, self.hop, key, data, write_id=shard.shard, sha256=digest)
        pin = Pin(key=key, version_id=info.version_id, size=len(data), sha256=digest.hex())
        return msgspec.structs.replace(shard, key=key, part_size=len(data), digests=(digest,), pin=pin)


def _put_shard(shard: ShardRecord, txn: Txn) -> None:
    if txn.shard(shard.attempt, shard.shard) is not None:
        txn.put_shard(shard)


def _flushed(txn: Txn, attempt: str) -> None:
    record = txn.attempts.get(attempt)
    if record is not None and record.state is State.STAGED and all(shard.pin for shard in txn.shards_of(attempt)):
        txn.update_attempt(attempt, state=State.FLUSHED)


class World:
    """One world, from its start to the calm at its end."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        self.scenario = scenario
        self.root = root
        self.chance = random.Random(scenario.seed)
        self.clocks = virtual.Clocks(self.chance)
        self.judge = Judge(RUN)
        self.members = [f"n{index}" for index in range(scenario.members)]
        # A member that is known by its number only cannot be told from an owner that is none.
        self.promoter = scenario.promoter and scenario.named
        self.owner = "promoter" if self.promoter else self.members[0]
        self.nodes: dict[str, SimNode] = {}
        self.paused: dict[str, trio.Event] = {}
        self.deaths = self.disks_lost = 0
        self.network: Network
        self.nursery: trio.Nursery
        self._restarting = 0

    async def run(self) -> None:
        """Live through the scenario, then be calm, and end."""
        async with trio.open_nursery() as self.nursery:
            self.judge.stop = self.nursery.cancel_scope.cancel
            self.network = Network(self.chance, self.scenario.rates, self.nursery)
            names = [*self.members, "promoter"] if self.promoter else self.members
            for name in names:
                self.clocks.wall[name] = self.chance.uniform(-3600.0, 3600.0)
                self.clocks.zero[name] = self.chance.uniform(0.0, 1e6)
            for name in names:
                await self.start(name)
            for event in self.scenario.events:
                self.nursery.start_soon(self._happen, event)
            with trio.move_on_after(LIFE):
                await train(self, self.scenario.saves)
            await self._calm()
            self.nursery.cancel_scope.cancel()
        for node in self.nodes.values():
            for record in records(node):
                self.judge.watch(self.judge.ended, node.name, record)

    # nodes

    async def start(self, name: str, after: SimNode | None = None) -> None:
        """Start a node on whatever is on its disk, or its engine alone."""
        settings = Settings(
            member=name,
            names=tuple(self.members) if self.scenario.named else (),
            count=len(self.members),
            owner=name == self.owner,
            absent_after=5.0,
            deadline=60.0,
            poll=5.0,
        )
        node = self.nodes[name] = SimNode(self, name, settings, after=after)
        self.nursery.start_soon(node.live)

    def kill_soon(self, node: SimNode) -> None:
        """Let the engine of a node die where it is now."""
        if not node.down and not self._ending():
            self.nursery.start_soon(self._restart, node.name, self.chance.uniform(0.0, 10.0))

    def _ending(self) -> bool:
        return self.nursery.cancel_scope.cancel_called

    async def _restart(self, name: str, seconds: float, *, mount: bool = False, lose_disk: bool = False) -> None:
        node = self.nodes[name]
        if node.down:
            return
        node.down = True
        self.disks_lost += lose_disk
        self._restarting += 1
        while node.scope is None:  # noqa: ASYNC110
            await trio.sleep(0.1)
        node.scope.cancel()
        await node.dead.wait()
        await trio.sleep(seconds)
        node.close()
        if lose_disk:
            (self.root / name).rename(self.root / f"lost-{len(os.listdir(self.root))}")
        self._restarting -= 1
        await self.start(name, None if mount else node)

    async def ready(self) -> None:
        """Return when the mounts of all members are there."""
        while any(self.nodes[name].down for name in self.members):  # noqa: ASYNC110
            await trio.sleep(1.0)

    # what happens

    async def _happen(self, event: Event) -> None:
        await trio.sleep(event.at)
        names = sorted(self.nodes)
        name = names[event.node % len(names)]
        if self.network.calm:
            return
        match event.what:
            case "engine":
                await self._restart(name, event.seconds / 10)
            case "node":
                await self._restart(name, event.seconds, mount=True)
            case "disk":
                while self._unopened():  # noqa: ASYNC110
                    await trio.sleep(1.0)
                if self.network.calm:
                    return
                await self._restart(name, event.seconds, mount=True, lose_disk=True)
            case "pause":
                if name not in self.paused:
                    self.paused[name] = trio.Event()
                    await trio.sleep(event.seconds)
                    self._resume(name)
            case "cut":
                self.network.cut.add(name)
                await trio.sleep(event.seconds)
                self.network.cut.discard(name)
            case "owner":
                self.owner = name
                await self._restart(name, 1.0, mount=True)
            case "clock":
                self.clocks.wall[name] -= event.seconds * 100
            case "damage":
                self._damage(self.nodes[name])

    @staticmethod
    def _damage(node: SimNode) -> None:
        if node.down:
            return
        for record in records(node):
            if not record.foreign and not record.state.final and record.closed_at is None and record.opened_epoch:
                node.end(record.attempt, "damaged")

    def _unopened(self) -> bool:
        """Return whether a save is closed of which the bucket does not know yet."""
        found = [record for node in self.nodes.values() for record in records(node)]
        return any(one.closed_at is not None and one.opened_epoch is None and not one.state.final for one in found)

    def _resume(self, name: str) -> None:
        event = self.paused.pop(name, None)
        if event is not None:
            event.set()

    # the end

    async def _calm(self) -> None:
        """Let nothing more go wrong: everything comes to an end, and a save after that is published."""
        self.network.calm = True
        self.network.cut.clear()
        for name in list(self.paused):
            self._resume(name)
        await self._settled(lambda: not self._restarting, "all nodes are up")
        await self._operate()
        await self._settled(lambda: not self._unfinished(), "every closed save has ended")
        final = Save("final", 10**6, tuple(range(len(self.members))), 0)
        truth = await make(self, final)
        await self._settled(lambda: self._final(truth.generation), "the last save is published")
        await self._settled(lambda: not self._left(), "what nobody has closed is superseded")

    async def _operate(self) -> None:
        """Start owners again that are not to own the run, or have lost it, as the operator must."""
        for node in list(self.nodes.values()):
            if node.settings.owner and not node.down and (node.name != self.owner or self._fenced(node)):
                await self._restart(node.name, 1.0, mount=True)

    def _fenced(self, node: SimNode) -> bool:
        with node.journal.read() as txn:
            run = txn.runs.get(RUN)
        return bool(run and run.fenced_by)

    def _unfinished(self) -> list[str]:
        return [
            f"{node.name}: {record.generation} is {record.state.value}, {record.error or 'no error'}"
            for node in self.nodes.values()
            for record in records(node)
            if not record.state.final and (record.closed_at is not None or self._is_closed(record))
        ]

    def _is_closed(self, attempt: AttemptRecord) -> bool:
        """Return whether somebody has closed an attempt in which a node has no part."""
        return attempt.foreign and self.judge.store.get(Keys().close(RUN, attempt.attempt)) is not None

    def _left(self) -> bool:
        return any(one.foreign and not one.state.final for node in self.nodes.values() for one in records(node))

    def _final(self, generation: str) -> bool:
        found = [one for name in self.members for one in records(self.nodes[name]) if one.generation == generation]
        return len(found) >= len(self.members) and all(one.state is State.PUBLISHED for one in found)

    async def _settled(self, holds: Callable[[], bool], what: str) -> None:
        deadline = trio.current_time() + PATIENCE
        while not holds():
            if trio.current_time() > deadline:
                raise Violation(f"not in {PATIENCE:g} s: {what}; " + "; ".join(self._unfinished()))
            await trio.sleep(1.0)
            if self.network.calm:
                await self._operate()  # an owner may find out late that it has lost the run


@dataclass
class Outcome:
    """What a world has seen, for figures."""

    effects: int = 0
    requests: int = 0
    faults: int = 0
    whole: int = 0
    published: int = 0
    owners: int = 0
    error: Violation | None = None
    trace: str = ""
    seconds: float = field(default=0.0)


def simulate(scenario: Scenario) -> Outcome:
    """Live through a scenario. Raises Violation when an invariant did not hold."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = World(scenario, root)
        # A simulated crash loses no page cache, so nothing need be synced.
        stack.enter_context(patch.object(journal.lmdb, "open", partial(lmdb.open, sync=False)))
        stack.enter_context(patch.object(journal, "RESERVED", 0))
        stack.enter_context(patch.object(sharing, "PATIENCE", 10.0))
        stack.enter_context(world.clocks.installed())
        stack.enter_context(_quiet())
        try:
            virtual.run(world.run, scenario.seed)
        except* Violation as group:
            world.judge.violation = world.judge.violation or _first(group)
        finally:
            for node in world.nodes.values():
                node.close()
        if world.judge.violation is not None:
            raise Violation(f"{world.judge.violation}") from None
        truths = world.judge.saves.values()
        return Outcome(
            effects=world.judge.effects,
            requests=world.network.requests,
            faults=world.network.faults,
            whole=sum(truth.marked for truth in truths),
            published=len(world.judge.published),
            owners=world.judge.history[-1][0].epoch,
            trace=hashlib.sha256(repr(world.judge.history).encode()).hexdigest(),
        )


def _first(group: BaseExceptionGroup[Violation]) -> Violation:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Violation)
    return error


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing: warnings are what a bad network brings."""
    root = logging.getLogger()
    disabled = root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
