"""Several members of one run on one memory store: real journals, real pins, the real publisher and looks; the mount and
the flusher are stand-ins. Time is trio's, so that waits cost nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import trio

from cachefs.formats.records import AttemptRecord, RunRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish.collecting import Collector
from cachefs.publish.looking import Looking
from cachefs.publish.members import CloseAsked
from cachefs.publish.members import Member as Looker
from cachefs.publish.problems import Problems
from cachefs.publish.publisher import Publisher
from cachefs.publish.sealing import Completeness, no_checks
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes
from cachefs.restore.reader import read_pointer
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Hop, Inline
from tests.publish.stage import RUN, Member

T = TypeVar("T")


class InlineJournal(Journal):
    """Commits in place: a thread would let the test's clock jump ahead while it works."""

    async def write(self, fn: Callable[[Txn], T]) -> T:
        await trio.lowlevel.checkpoint()
        try:
            return self.write_now(fn)
        finally:
            self.note_commit()


class Node(Member):
    """A member's node. `write` and `mark` are what training code does; everything else follows."""

    journal_type = InlineJournal
    settings: Settings
    hop: Hop = Inline()
    scope: trio.CancelScope | None = None
    dead: trio.Event
    problems: Problems
    started: int | None = None
    """The serial of the newest save when the daemon started; None for now."""
    deaf = False
    """Ignores what it is asked to close."""

    def write(self, generation: str, step: int, files: Mapping[str, bytes], **fields: Any) -> str:
        """Write the files of a save that stays open."""
        self.serve()
        serial = self.journal.write_now(lambda txn: txn.next_serial())
        unique = hashlib.sha256(f"{self.settings.incarnation}/{serial}/{self.staging.tree}".encode()).hexdigest()[:32]
        attempt = self.save(generation, step, files, state=State.OPEN, attempt=unique, **fields)
        self.journal.write_now(lambda txn: txn.update_attempt(attempt, serial=serial))
        self.journal.note_commit()
        return attempt

    def serve(self) -> None:
        """Let the mount serve: after the first look, or when that takes too long."""
        self.journal.write_now(lambda txn: txn.update_about(serving=self.settings.incarnation))

    def mark(self, attempt: str, signal: str = "marker", strength: str = "A") -> None:
        """Let the close signal of a save appear here."""

        def close(txn: Txn) -> None:
            record = txn.attempts.get(attempt)
            if record is not None and record.closed_at is None and not record.state.final:
                size = sum(shard.identity.size for shard in txn.shards_of(attempt))
                changes = {"closed_at": 2000.0, "signal": signal, "strength": strength, "size": size}
                txn.update_attempt(attempt, state=State.STAGED, **changes)

        self.journal.write_now(close)
        self.journal.note_commit()

    def asked(self, close: CloseAsked) -> None:
        if not self.deaf:
            self.mark(close.save.attempt, f"closed by {close.close.member}")

    def latest(self, generation: str) -> AttemptRecord:
        """Return the newest record of a generation."""
        with self.journal.read() as txn:
            found = [one for one in txn.attempts.scan() if one.generation == generation]
        return max(found, key=lambda one: one.serial)

    def known(self, run: str) -> RunRecord:
        """Return what the journal knows of a run."""
        with self.journal.read() as txn:
            return txn.run(run)

    async def live(
        self, *, completeness: Completeness = no_checks, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Be a daemon until killed: what engine.py starts."""
        self.started = self.newest()
        self.dead = trio.Event()
        self.problems = Problems()
        with trio.CancelScope() as self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._flush)
                collector = await self._own(nursery, completeness) if self.settings.owner else None
                looker = Looker(
                    self.journal,
                    self._writes(),
                    self.settings,
                    nursery,
                    started=self.started,
                    close=self.asked,
                    problems=self.problems,
                )
                looking = Looking(self.journal, self._writes(), self.settings, looker, collector, self.problems)
                looking.first = self.serve
                await nursery.start(looking.run)
                task_status.started()
                while True:
                    await self.journal.wait_changed()
                    looking.wake()
        self.dead.set()

    def newest(self) -> int:
        """Return the serial of the newest save when the daemon started."""
        if self.started is not None:
            return self.started
        with self.journal.read() as txn:
            return txn.about().serial

    def _writes(self) -> Writes:
        return Writes(self.store, self.keys, self.hop, self.problems.pause)

    async def _own(self, nursery: trio.Nursery, completeness: Completeness) -> Collector:
        ownership = self.ownership()
        publisher: Publisher

        def wake() -> None:
            publisher.wake()

        collector = Collector(
            self.journal,
            self._writes(),
            ownership,
            self.settings,
            path=lambda run, generation: f"{run}/{generation}",
            changed=wake,
            problems=self.problems,
        )
        publisher = Publisher(
            self.journal,
            self.store,
            self.keys,
            self.hop,
            self.pins,
            ownership,
            self.settings,
            completeness=completeness,
            take_over=collector.take_over,
            started=self.newest(),
        )
        await nursery.start(publisher.run)
        nursery.start_soon(self._wake, wake)
        return collector

    async def _wake(self, wake: Callable[[], None]) -> None:
        while True:
            await self.journal.wait_changed()
            wake()

    async def _flush(self) -> None:
        while True:
            self.flush_open()
            await trio.sleep(1)

    async def kill(self) -> None:
        """Let the daemon die; what is under way is not finished."""
        assert self.scope is not None
        self.scope.cancel()
        await self.dead.wait()
        self.close()


class Cluster:
    """The nodes of a run by name; the first one owns it."""

    def __init__(self, root: Path, store: ObjectStore, nursery: trio.Nursery) -> None:
        self.root = root
        self.store = store
        self.nursery = nursery
        self.nodes: dict[str, Node] = {}
        self.starts = 0

    async def start(self, *names: str, owner: str = "", count: int = 0, completeness: Completeness = no_checks) -> None:
        """Start nodes that know each other, or with `count` only how many they are."""
        for name in names:
            settings = {"names": () if count else names, "count": count or len(names)}
            await self.add(name, owner=name == (owner or names[0]), completeness=completeness, **settings)

    async def add(
        self, name: str, *, completeness: Completeness = no_checks, store: ObjectStore | None = None, **settings: Any
    ) -> Node:
        """Start one node on whatever is on its disk."""
        node = Node(self.root, store or self.store, name=name)
        self.starts += 1
        incarnation = f"{name}-{self.starts}"
        node.settings = Settings(
            member=name, incarnation=incarnation, absent_after=5.0, deadline=600.0, poll=5.0, **settings
        )
        self.nodes[name] = node
        await self.nursery.start(lambda task_status: node.live(completeness=completeness, task_status=task_status))
        return node

    async def restart(self, name: str, *, lose_disk: bool = False, **changes: Any) -> Node:
        """Kill a node and start it again, on an empty disk if it was lost."""
        old = self.nodes[name]
        await old.kill()
        if lose_disk:
            (self.root / name).rename(self.root / f"{name}-lost-{len(list(self.root.iterdir()))}")
        settings = {"owner": old.settings.owner, "names": old.settings.names, "count": old.settings.count} | changes
        return await self.add(name, store=old.store, **settings)

    def save(self, generation: str, step: int, **files: Mapping[str, bytes]) -> dict[str, str]:
        """Let the named nodes write their files of a save; return their attempts."""
        return {name: self.nodes[name].write(generation, step, given) for name, given in files.items()}

    async def until(self, holds: Callable[[], Any], what: str, patience: float = 5000.0) -> None:
        """Wait until something holds, looking whenever nothing else is to be done."""
        with trio.move_on_after(patience):
            while not holds():  # noqa: ASYNC110  (several journals and a store: there is no one event)
                await trio.sleep(0.5)
            return
        states = {name: [(r.generation, r.state.value, r.error) for r in records(n)] for name, n in self.nodes.items()}
        raise AssertionError(f"{what}; {states}")

    async def until_state(self, generation: str, state: State, *names: str) -> None:
        """Wait until the newest record of a generation is in a state, on the named nodes or all that have one."""

        def reached() -> bool:
            nodes = [self.nodes[name] for name in names] or [n for n in self.nodes.values() if has(n, generation)]
            return bool(nodes) and all(
                has(node, generation) and node.latest(generation).state is state for node in nodes
            )

        await self.until(reached, f"{generation} is not {state.value}")

    def published(self) -> list[str]:
        """Return what the pointer has named, oldest first."""
        seen = read_pointer(self.store, next(iter(self.nodes.values())).keys, RUN)
        return [] if seen is None else next(iter(self.nodes.values())).generations()


def records(node: Node) -> list[AttemptRecord]:
    """Return a node's records, the oldest first."""
    with node.journal.read() as txn:
        return sorted(txn.attempts.scan(), key=lambda one: one.serial)


def has(node: Node, generation: str) -> bool:
    """Return whether a node has a record of a generation."""
    return any(one.generation == generation for one in records(node))


def shards(cluster: Cluster) -> dict[str, str]:
    """Return who wrote which file of the newest published generation."""
    manifest = next(iter(cluster.nodes.values())).manifest()
    return {path: shard.member for shard in manifest.shards for path in shard.paths}


Clusters = Callable[..., AbstractAsyncContextManager[Cluster]]
"""Makes a cluster over a store, a memory store by default."""
