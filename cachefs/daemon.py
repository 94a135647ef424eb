"""The composition root: builds every part, starts the tasks, and takes them down in order.

start:  settings ─► mountpoint ─► staging lock ─► journal, pins ─► store, probe ─► saves of the last process ─► mount
tasks:  tracker, early uploads, stager (local)    flusher, loose mirror, publisher (behind the gate)
        control socket, metrics, watchdog, signals
stop:   unmount ─► drain within its bound ─► cancel the tasks ─► close journal and staging
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import structlog
import trio

from cachefs import __version__, clock, control, metrics, notify
from cachefs.config import Config
from cachefs.errors import CachefsError, PendingError
from cachefs.flush.loose import LooseMirror
from cachefs.flush.uploader import Flusher, FlushSettings
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Manifest, Shard
from cachefs.formats.records import State
from cachefs.gate import Gate, MeteredHop
from cachefs.gauges import Gauges
from cachefs.generations.catalog import select
from cachefs.generations.completeness import Source, check_generation
from cachefs.generations.detector import Detector
from cachefs.generations.placement import Placer
from cachefs.generations.presets import Preset, from_config
from cachefs.generations.stager import Stager
from cachefs.generations.tracker import Hints, Tracker
from cachefs.journal import Journal
from cachefs.mount import session
from cachefs.mount.kernel import Passthrough
from cachefs.mount.tree import Tree
from cachefs.observer import DaemonObserver
from cachefs.publish.ownership import Ownership
from cachefs.publish.publisher import Publisher
from cachefs.publish.steps import Settings as PublishSettings
from cachefs.publish.writes import Writes
from cachefs.reporter import Live, Reporter
from cachefs.staging.capacity import Room
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins
from cachefs.store.hop import Threads
from cachefs.store.open import open_store

_log = structlog.get_logger(__name__)
RESTORE_WORKERS = 4
_LOOK = 0.2
"""Seconds after which a drain looks again at what only time changes."""
SPARE_REQUESTS = 8
"""Requests beside those of the uploads: pointers, manifests, listings."""


def run(config: Config, *, ready: Callable[[], None] | None = None) -> int:
    """Serve one mount until it is unmounted or the process is told to stop; return the exit code.

    `ready` is called once the mount serves. Raises CachefsError for everything a mount cannot start with, and
    PendingError when it stops with data that is not in the store.
    """
    with ExitStack() as stack:
        daemon = Daemon(config, stack)
        try:
            trio.run(daemon.serve, ready or (lambda: None))
        except BaseExceptionGroup as group:
            known, others = group.split(CachefsError)
            if known is None or others is not None:
                raise
            raise _first(known) from group
    return 0


def _presets(config: Config) -> tuple[Preset, ...]:
    """Return the presets in use, with the configured times in place of their own. Raises InvalidError."""
    times = {"settle": config.settle, "quiet": config.quiet}
    changes = {name: value for name, value in times.items() if value is not None}
    chosen = select(config.presets, from_config(config.preset))
    return tuple(msgspec.structs.replace(preset, **changes) for preset in chosen)


def _completeness(manifest: Manifest, open_source: Callable[[Shard], Source]) -> list[str]:
    """Check the formats of a generation's files; return the names of the checks. Raises CorruptError."""
    files = {path: open_source(shard) for shard in manifest.shards for path in shard.paths}
    return check_generation(files, manifest.kind, manifest.preset)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


class Daemon:
    """Everything that belongs to one mount."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        """Build all parts; `stack` closes them in reverse order. Nothing runs yet."""
        self._config = config
        self._presets = _presets(config)
        session.prepare(config.mountpoint)
        self._passthrough = Passthrough(config.data_path, overlay=session.is_overlay(config.staging))
        self._staging = Staging(config.staging)
        stack.callback(self._staging.close)
        self._journal = Journal(self._staging.journal)
        stack.callback(self._journal.close)
        self._pins = Pins(self._staging)
        self._metrics = metrics.Metrics()
        if (address := config.metrics_address) is not None:
            stack.callback(metrics.serve(address, self._metrics.registry).close)
        requests = config.upload_concurrency + RESTORE_WORKERS + SPARE_REQUESTS
        self._store = open_store(
            config.store, endpoint_url=config.endpoint_url, region=config.region, connections=requests
        )
        self._keys = Keys(self._store.prefix)
        self._gate = Gate(self._store, self._metrics, publish=config.publish)
        if config.publish:
            self._gate.try_now()
        self._threads = requests
        self._stop_drain = trio.CancelScope()

    async def serve(self, ready: Callable[[], None]) -> None:
        """Run everything; returns when the mount has ended and what could be drained is drained."""
        config = self._config
        self._hop = MeteredHop(Threads(self._threads), self._metrics)
        self._build()
        await self._tracker.resume()
        self._session.start()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._stager.run)
                await nursery.start(self._tracker.run)
                await nursery.start(self._tracker.early.run)
                await nursery.start(control.serve, self._staging.socket, self._reporter.handle)
                await nursery.start(self._gauges.run)
                await nursery.start(self._watch_signals)
                nursery.start_soon(self._watchdog)
                if config.publish:
                    nursery.start_soon(self._publish)
                nursery.start_soon(self._announce, ready)
                await self._session.serve()
                _log.info("unmounting")
                notify.stopping("draining")
                self._session.stop()
                await self._drain()
                nursery.cancel_scope.cancel()
        finally:
            self._session.stop()
        self._report_pending()

    def _build(self) -> None:
        config, staging = self._config, self._staging
        placer = Placer(self._presets, config.run)
        self._flusher = Flusher(
            self._journal,
            self._store,
            self._keys,
            self._hop,
            self._pins,
            FlushSettings(
                member=config.member, part_size=config.part_size, upload_concurrency=config.upload_concurrency
            ),
            on_flushed=lambda: self._wake_publisher(),
        )
        self._loose = LooseMirror(
            self._journal,
            self._store,
            self._keys,
            self._hop,
            staging.tree_fd,
            config.run,
            interval=config.loose_interval,
            part_size=config.part_size,
            is_loose=lambda path: placer.place(path) is None,
        )
        self._publisher: Publisher | None = None
        self._detector = Detector(placer, open_deadline=config.close_deadline)
        self._tracker = Tracker(
            self._journal,
            self._pins,
            staging.tree_fd,
            self._detector,
            placer,
            self._keys,
            member=config.member,
            early_delay=config.early_upload_delay,
            hints=Hints(
                opened=self._wake_publisher,
                closed=self._closed,
                pinned=self._flusher.wake,
                loose=self._loose.note if config.loose else (lambda path: None),
            ),
        )
        self._stager = Stager(self._journal, self._pins, staging.tree_fd, staged=self._staged)
        room = Room(staging, reserve=config.reserve, timeout=config.full_timeout)
        live = Live(
            publishing_blocked=lambda: self._gate.blocked,
            store_health=lambda: self._hop.health,
            data_path=lambda: self._passthrough.shown,
            staging_free=staging.free_bytes,
            loose_pending=self._loose.pending,
            open_saves=self._tracker.open_saves,
            close_now=self._tracker.close_now,
        )
        self._reporter = Reporter(self._journal, config, self._store.url, staging.socket, staging.tree, live)
        observer = DaemonObserver(self._tracker, self._reporter, self._journal, room, self._metrics)
        tree = Tree(staging, self._pins, observer, self._passthrough)
        self._session = session.Session(tree, config.mountpoint, allow_other=config.allow_other)
        self._gauges = Gauges(self._metrics, self._journal, self._reporter, self._flusher, staging)

    # ---- hints between the parts; each re-reads the journal

    def _wake_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.wake()

    def _closed(self) -> None:
        self._stager.wake()
        self._flusher.wake()

    def _staged(self) -> None:
        self._flusher.wake()
        self._wake_publisher()

    async def _publish(self) -> None:
        """Flush and publish, once the gate is open."""
        report = await self._gate.wait_open(self._hop)
        config = self._config
        self._metrics.publishing.set(1)
        ownership = Ownership(
            self._journal,
            Writes(self._store, self._keys, self._hop),
            config.member,
            poll=config.pointer_poll,
        )
        self._publisher = Publisher(
            self._journal,
            self._store,
            self._keys,
            self._hop,
            self._pins,
            ownership,
            PublishSettings(
                member=config.member,
                host=config.member,
                writer=f"cachefs {__version__}",
                level=config.test_level,
                workers=RESTORE_WORKERS,
                ranges=report.ranges,
            ),
            completeness=_completeness,
            changed=lambda _attempt: self._flusher.wake(),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(self._flusher.run)
            await nursery.start(self._publisher.run)
            if config.loose:
                # What changed while nobody looked is found by its identity.
                for name in os.listdir(self._staging.tree_fd):
                    self._loose.note(os.fsencode(name))
                await nursery.start(self._loose.run)

    # ---- the service around it

    async def _announce(self, ready: Callable[[], None]) -> None:
        config = self._config
        await self._passthrough.wait_settled()
        mode = self._passthrough.mode
        self._metrics.set_data_path(mode.value)
        _log.info(
            "mounted",
            mountpoint=str(config.mountpoint),
            store=self._store.url,
            staging=str(config.staging),
            publishing=self._gate.blocked or "yes",
            data_path=self._passthrough.shown,
        )
        notify.ready(self._summary())
        ready()

    def _summary(self) -> str:
        status = self._reporter.status()
        blocked = f"NOT PUBLISHING: {status.publishing_blocked}; " if status.publishing_blocked else ""
        return f"{blocked}{status.backlog_files} files, {status.backlog_bytes} bytes to flush"

    async def _watchdog(self) -> None:
        """Tell the service manager that the loop is alive, and measure how late it is."""
        interval = notify.watchdog_interval() or 5.0
        interval = min(interval, 5.0)
        while True:
            before = clock.monotonic()
            await trio.sleep(interval)
            self._metrics.loop_lag_seconds.set(max(0.0, clock.monotonic() - before - interval))
            notify.watchdog()
            notify.status(self._summary())

    async def _watch_signals(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The first signal unmounts and drains; the second one stops at once."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            stopping = False
            async for number in signals:
                _log.info("stopping", signal=signal.Signals(number).name)
                if stopping:
                    self._stop_drain.cancel()
                stopping = True
                await self._session.leave()

    async def _drain(self) -> None:
        if not self._config.publish:
            return
        end = clock.monotonic() + self._config.drain_timeout
        with self._stop_drain, trio.move_on_after(self._config.drain_timeout):
            notify.extend_timeout(self._config.drain_timeout)
            while self._reporter.unpublished() or self._closing_before(end):
                with trio.move_on_after(_LOOK):
                    await self._journal.wait_changed()

    def _closing_before(self, end: float) -> bool:
        """Return whether a save is complete but for a quiet time that ends in time: nobody can write to it any more."""
        deadline = self._detector.next_deadline()
        return deadline is not None and deadline < end

    def _report_pending(self) -> None:
        with self._journal.read() as txn:
            waiting = [a for a in txn.attempts.scan() if a.closed_at is not None and not a.state.final]
            shards = [s for a in waiting for s in txn.shards_of(a.attempt) if s.pin is None]
            unfinished = [a.path for a in txn.attempts.scan() if a.closed_at is None and a.state is State.OPEN]
        if unfinished:
            _log.warning("saves are left open: no close signal came", saves=len(unfinished), first=unfinished[0])
        if waiting and self._config.publish:
            size = sum(shard.identity.size for shard in shards)
            raise PendingError(
                f"stopped with {len(waiting)} generations not published: {len(shards)} files, {size} bytes"
                " not in the store yet",
                hint="they are kept in staging; the next start goes on",
            )
