"""The engine: everything that reads staged bytes or talks to the store, in a process of its own.

Hashing and sending keep processors and the interpreter's lock busy; in the mount process they would make training code
wait for its opens and closes. The journal is the queue between the two, so the engine can be killed at any moment and
started again; the link carries hints and figures only (link.py). It runs with low processor and idle disk priority, and
dies with the mount process.

    python -m cachefs.engine FD PID        FD: its end of the socket pair; PID: the mount process
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable

import msgspec
import trio

from cachefs import link, log
from cachefs.flush.loose import LooseMirror
from cachefs.flush.uploader import Flusher
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Manifest, Shard
from cachefs.gate import Gate
from cachefs.generations.catalog import configured
from cachefs.generations.completeness import Source, check_generation
from cachefs.generations.placement import Placer
from cachefs.generations.stager import Stager
from cachefs.journal import Journal
from cachefs.publish import loading
from cachefs.publish.collecting import Collector
from cachefs.publish.looking import Looking
from cachefs.publish.members import CloseAsked, Member
from cachefs.publish.ownership import Ownership, lift_fences
from cachefs.publish.problems import Problems
from cachefs.publish.publisher import Publisher
from cachefs.publish.sealing import CLOSED_BY
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes
from cachefs.retention.keeper import Counts, Keeper
from cachefs.settings import flush_settings, publish_settings, retention_policy, store_of, threads
from cachefs.staging.pins import PinReader
from cachefs.store.counting import CountingHop

QUIET = 30.0
"""Seconds that the files of a save must be quiet after another member's weak close signal, if the configuration says
nothing else.
"""
NICE = 10
REPORT_EVERY = 0.5
"""Seconds between two figures."""
_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of ioprio_set(2) by machine (asm/unistd_64.h, asm-generic/unistd.h); others keep their normal priority."""
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


class Engine:
    """Stages, flushes and publishes what the journal holds."""

    def __init__(self, start: link.Start, channel: link.Link[link.ToEngine]) -> None:
        self._config = config = link.unpacked(start.config)
        self._incarnation = start.incarnation
        self._started = start.serial
        self._link = channel
        self._journal = Journal(config.staging / "journal")
        self._tree_fd = os.open(config.staging / "tree", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._pins = PinReader(config.staging / "pins")
        self._store = store_of(config)
        self._keys = Keys(self._store.prefix)
        self._hop = CountingHop(self._store, threads(config))
        self._gate = Gate(self._store, ranges=start.ranges, blocked=start.blocked, interval=config.probe_interval)
        self._hop.failed = self._gate.suspect
        self._stager = Stager(self._journal, self._pins, self._tree_fd, staged=self._staged)
        self._flusher = Flusher(
            self._journal,
            self._store,
            self._keys,
            self._hop,
            self._pins,
            flush_settings(config),
            on_flushed=self._wake_publisher,
        )
        self._placer = Placer(configured(config), config.run)
        self._loose = LooseMirror(
            self._journal,
            self._store,
            self._keys,
            self._hop,
            self._tree_fd,
            config.run,
            interval=config.loose_interval,
            part_size=config.part_size,
            throttle=self._flusher.throttle,
            is_loose=self._placer.is_loose,
        )
        self._publisher: Publisher | None = None
        self._looking: Looking | None = None
        self._collected = Counts()
        self._problems: tuple[Problems, ...] = ()
        """What the looks, the watch over owned pointers, and garbage collection cannot do."""

    async def run(self) -> None:
        """Work until the mount process closes its end of the link."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._link.run)
            await nursery.start(self._stager.run)
            nursery.start_soon(self._tell)
            nursery.start_soon(self._report)
            if self._config.publish:
                nursery.start_soon(self._publish)
            while (message := await self._link.receive()) is not None:
                self._take(message)
            nursery.cancel_scope.cancel()

    def _take(self, message: link.ToEngine) -> None:
        match message:
            case link.LooseChanged(path):
                if self._config.loose:
                    self._loose.note(path)
            case link.Hint("closed"):
                self._stager.wake()
                self._flusher.wake()
            case link.Hint("pinned"):
                self._flusher.wake()
            case _:
                self._wake_publisher()
                self._flusher.wake()

    def _wake_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.wake()
        if self._looking is not None:
            self._looking.wake()

    def _staged(self) -> None:
        self._flusher.wake()
        self._wake_publisher()

    async def _publish(self) -> None:
        """Flush and publish while the gate is open. What is cut short goes on from the journal when it opens again."""
        while True:
            ranges = await self._gate.wait_open(self._hop)
            # Nobody shall read that the gate is closed after a save was published.
            self._link.send_nowait(self._figures())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._work, ranges)
                await self._gate.watch(self._hop)
                nursery.cancel_scope.cancel()
            self._publisher = self._looking = None
            self._problems = ()
            self._link.send_nowait(self._figures())

    async def _work(self, ranges: bool) -> None:
        """Flush and publish."""
        config = self._config
        await self._hop(loading.sweep, config.staging / "load")
        settings = publish_settings(config, ranges, self._incarnation)
        looks, watch, gc = self._problems = Problems(), Problems(), Problems("garbage collection: ")
        writes = Writes(self._store, self._keys, self._hop, looks.pause)
        if not settings.owner:
            await self._journal.write(lift_fences)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._flusher.run)
            collector = await self._own(settings, nursery, writes, looks, watch, gc) if settings.owner else None
            member = Member(
                self._journal,
                writes,
                settings,
                nursery,
                started=self._started,
                close=self._close,
                problems=looks,
                joined=self._flusher.wake,
                confirm=self._gate.confirm,
            )
            self._looking = Looking(self._journal, writes, settings, member, collector, looks)
            self._looking.first = lambda: self._link.send_nowait(link.Looked())
            await nursery.start(self._looking.run)
            if config.loose:
                # What changed while nobody looked is found by its identity.
                for name in map(os.fsencode, os.listdir(self._tree_fd)):
                    is_dir = stat.S_ISDIR(os.stat(name, dir_fd=self._tree_fd, follow_symlinks=False).st_mode)
                    if is_dir or self._placer.is_loose(name):
                        self._loose.note(name)
                await nursery.start(self._loose.run)

    async def _own(
        self, settings: Settings, nursery: trio.Nursery, writes: Writes, looks: Problems, watch: Problems, gc: Problems
    ) -> Collector:
        """Start what only the owner of runs does."""
        config = self._config
        ownership = Ownership(
            self._journal,
            writes,
            config.member,
            poll=config.pointer_poll,
            incarnation=self._incarnation,
            problems=watch,
        )
        collector = Collector(
            self._journal,
            writes,
            ownership,
            settings,
            path=lambda run, generation: generation if run == config.run else f"{run}/{generation}",
            changed=self._wake_publisher,
            problems=looks,
            confirm=self._gate.confirm,
        )
        self._publisher = Publisher(
            self._journal,
            self._store,
            self._keys,
            self._hop,
            self._pins,
            ownership,
            settings,
            completeness=completeness,
            changed=lambda _attempt: self._flusher.wake(),
            take_over=collector.take_over,
            confirm=self._gate.confirm,
            started=self._started,
        )
        await nursery.start(self._publisher.run)
        if config.gc:
            keeper = Keeper(
                writes,
                retention_policy(config),
                ownership.owned,
                self._collected,
                gc,
                interval=config.gc_interval,
                holder=f"gc of {config.member}",
            )
            nursery.start_soon(keeper.run)
        return collector

    def _close(self, asked: CloseAsked) -> None:
        """Have the mount process close a save that another member has closed."""
        quiet = 0.0
        if asked.weak:
            quiet = self._config.quiet if self._config.quiet is not None else QUIET
        by = f"{CLOSED_BY}{asked.close.member} ({asked.close.signal})"
        self._link.send_nowait(link.CloseSave(asked.save.path, asked.save.attempt, by, quiet))

    async def _tell(self) -> None:
        """Tell the mount process of every commit."""
        while True:
            await self._journal.wait_changed()
            self._link.send_nowait(link.Changed())

    async def _report(self) -> None:
        while True:
            self._link.send_nowait(self._figures())
            await trio.sleep(REPORT_EVERY)

    def _figures(self) -> link.Figures:
        flushed = self._flusher.statistics()
        return link.Figures(
            blocked=self._gate.blocked,
            health=self._hop.health,
            loose_pending=self._loose.pending(),
            flushed_bytes=flushed.flushed_bytes,
            orphans_aborted=flushed.orphans_aborted,
            failures=dict(flushed.failures),
            requests=dict(self._hop.requests),
            gc=msgspec.structs.asdict(self._collected),
            problems=tuple(one for problems in self._problems for one in problems.all()),
        )


def completeness(manifest: Manifest, open_source: Callable[[Shard], Source]) -> list[str]:
    """Check the formats of a generation's files; return the names of the checks. Raises CorruptError."""
    files = {path: open_source(shard) for shard in manifest.shards for path in shard.paths}
    return check_generation(files, manifest.kind, manifest.preset)


def _be_modest() -> None:
    """Die with the parent, and let training code and the mount go first on processors and disk.

    One processor is left alone: low priority does not help who has to wait until a time slice ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    processors = os.sched_getaffinity(0)
    if len(processors) > 1:
        os.sched_setaffinity(0, processors - {min(processors)})
    if number := _IOPRIO_SET.get(os.uname().machine):
        libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


async def _main(fd: int) -> None:
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))
    channel: link.Link[link.ToEngine] = link.Link(stream, link.ToEngine)
    start = await channel.receive()
    if isinstance(start, link.Start):
        config = link.unpacked(start.config)
        log.configure(config.log_level, config.log_format)
        await Engine(start, channel).run()


def main() -> None:
    """Run the engine on the socket whose descriptor is the first argument."""
    _be_modest()
    if os.getppid() != int(sys.argv[2]):
        return  # it died before the kernel knew whom to tell
    for number in (signal.SIGTERM, signal.SIGINT):
        # The mount process decides when the work ends. Not SIG_IGN: the command of a restore test would inherit it.
        signal.signal(number, lambda *_: None)
    trio.run(_main, int(sys.argv[1]))


if __name__ == "__main__":
    main()
