"""The composition root: builds every part, starts the tasks, and takes them down in order.

start:  settings ─► mountpoint ─► staging lock ─► journal, pins ─► store, probe ─► saves of the last process ─► mount
tasks:  tracker, early uploads, release of pins; control socket, metrics, watchdog, signals
        the engine, a process of its own (engine.py): stager; flusher, loose mirror, publisher behind the gate
stop:   unmount ─► drain within its bound ─► end the engine ─► cancel the tasks ─► close journal and staging
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import structlog
import trio

from cachefs import clock, control, metrics, notify
from cachefs.config.schema import Config
from cachefs.errors import CachefsError, PendingError, StagingError
from cachefs.formats.keys import Keys
from cachefs.gate import try_store
from cachefs.gauges import Gauges
from cachefs.generations.catalog import configured
from cachefs.generations.detector import Detector
from cachefs.generations.placement import Placer
from cachefs.generations.releaser import Releaser
from cachefs.generations.retrying import persist
from cachefs.generations.tracked import Hints
from cachefs.generations.tracker import Tracker
from cachefs.journal import Journal
from cachefs.link import CloseSave
from cachefs.mount import session
from cachefs.mount.kernel import Passthrough
from cachefs.mount.tree import Tree
from cachefs.observer import DaemonObserver
from cachefs.reporter import Live, Reporter
from cachefs.settings import load_of, store_of
from cachefs.staging.capacity import Room
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins
from cachefs.supervisor import Supervisor

_log = structlog.get_logger(__name__)
_CLOSES = 1000
"""Closes of other members that may wait to be carried out."""
_FIRST_LOOK = 15.0
"""Seconds that a mount with other members waits for the first look at what they have open: a save that was written
before it cannot be told from one of an earlier daemon of this name, and is refused if others close it meanwhile.
"""
_ENDING = 30.0
"""Seconds that ending the engine and unmounting may take after the drain; systemd is told."""


def run(config: Config, *, ready: Callable[[], None] | None = None, log_fd: int = 2) -> int:
    """Serve one mount until it is unmounted or the process is told to stop; return the exit code.

    `ready` is called once the mount serves; `log_fd` is where the engine process logs. Raises CachefsError for
    everything a mount cannot start with, and PendingError when it stops with data that is not in the store.
    """
    with ExitStack() as stack:
        daemon = Daemon(config, stack, log_fd)
        try:
            trio.run(daemon.serve, ready or (lambda: None))
        except BaseExceptionGroup as group:
            known, others = group.split(CachefsError)
            if known is None or others is not None:
                raise
            raise _first(known) from group
    return 0


def _claim(journal: Journal, store: str, member: str) -> None:
    """Bind a staging directory to a store and a member name; another one may follow when nothing is pending.

    Raises StagingError: object keys of pending saves hold both.
    """
    with journal.read() as txn:
        meta = txn.about()
        # An open save that was not announced holds no key yet.
        unfinished = [attempt for attempt in txn.attempts.scan() if not attempt.state.final]
        pending = [one.path for one in unfinished if one.closed_at is not None or one.opened_epoch is not None]
    if pending and meta.store and (meta.store, meta.member) != (store, member):
        raise StagingError(
            f"staging holds saves of member {meta.member} for {meta.store} that are not published ({pending[0]}, ...)",
            hint=f"mount it with --store {meta.store} --member {meta.member} until nothing is pending (cachefs flush)",
        )
    journal.write_now(lambda txn: txn.update_about(store=store, member=member))


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


class Daemon:
    """Everything that belongs to one mount."""

    def __init__(self, config: Config, stack: ExitStack, log_fd: int) -> None:
        """Build all parts; `stack` closes them in reverse order. Nothing runs yet."""
        self._config = config
        self._presets = configured(config)
        load_of(config)  # refuses what the engine could not run later
        self._check_drain()
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
        store = store_of(config)
        self._store_url = store.url
        self._keys = Keys(store.prefix)
        _claim(self._journal, store.url, config.member)
        ranges, blocked = try_store(store) if config.publish else (None, "mounted with --no-publish")
        self._supervisor = Supervisor(
            config,
            self._journal,
            ranges=ranges,
            blocked=blocked,
            changed=self._engine_changed,
            close=self._close_save,
            log_fd=log_fd,
        )
        self._closes = trio.open_memory_channel[CloseSave](_CLOSES)
        self._stop_drain = trio.CancelScope()

    def _check_drain(self) -> None:
        quiet = max((preset.quiet for preset in self._presets if preset.strength in "CD"), default=0.0)
        if self._config.publish and self._config.drain_timeout < quiet:
            _log.warning(
                "a stop may leave complete saves unpublished: drain_timeout is shorter than their quiet time",
                drain_timeout=self._config.drain_timeout,
                quiet=quiet,
            )

    async def serve(self, ready: Callable[[], None]) -> None:
        """Run everything; returns when the mount has ended and what could be drained is drained."""
        self._build()
        await self._tracker.resume()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._supervisor.run)
                await self._first_look()
                # What was found until now is older than all that this mount will hold (SharedRecord.before).
                await self._journal.write(lambda txn: txn.update_about(serving=self._supervisor.incarnation))
                self._session.start()
                await nursery.start(self._tracker.run)
                await nursery.start(self._tracker.early.run)
                await nursery.start(self._releaser.run)
                await nursery.start(self._tracker.outlived.run)
                await nursery.start(control.serve, self._staging.socket, self._reporter.handle)
                await nursery.start(self._gauges.run)
                await nursery.start(self._watch_signals)
                nursery.start_soon(self._close_saves)
                nursery.start_soon(self._mirror_open_files)
                nursery.start_soon(self._watchdog)
                nursery.start_soon(self._tell_status)
                nursery.start_soon(self._announce, ready)
                await self._session.serve()
                _log.info("unmounting")
                notify.stopping("draining")
                self._session.stop()
                await self._drain()
                await self._supervisor.stop()
                nursery.cancel_scope.cancel()
        finally:
            self._session.stop()
        self._report_pending()

    def _build(self) -> None:
        config, staging = self._config, self._staging
        placer = Placer(self._presets, config.run)
        alone = config.membership.count == 1
        self._detector = Detector(placer, open_deadline=config.close_deadline, alone=alone)
        self._tracker = Tracker(
            self._journal,
            self._pins,
            staging.tree_fd,
            self._detector,
            placer,
            self._keys,
            member=config.member,
            boot=clock.boot_id(),
            early_delay=config.early_upload_delay,
            hints=Hints(
                opened=lambda: self._supervisor.hint("opened"),
                closed=lambda: self._supervisor.hint("closed"),
                pinned=lambda: self._supervisor.hint("pinned"),
                loose=self._supervisor.loose,
                over=lambda: self._releaser.wake(),
            ),
        )
        self._releaser = Releaser(self._journal, self._pins, publish=config.publish)
        room = Room(staging, reserve=config.reserve, timeout=config.full_timeout)
        live = Live(
            publishing_blocked=lambda: self._supervisor.figures.blocked,
            store_health=lambda: self._supervisor.figures.health,
            data_path=lambda: self._passthrough.shown,
            staging_free=staging.free_bytes,
            loose_pending=lambda: self._supervisor.figures.loose_pending,
            open_saves=self._tracker.open_saves,
            close_now=self._tracker.close_now,
            closing=self._tracker.closing,
            longest_idle=self._tracker.longest_idle,
            problems=lambda: self._supervisor.figures.problems,
            in_generation=lambda path: placer.place(path) is not None,
        )
        self._reporter = Reporter(self._journal, config, self._store_url, staging.socket, staging.tree, live)
        observer = DaemonObserver(self._tracker, self._reporter, self._journal, room, self._metrics)
        tree = Tree(staging, self._pins, observer, self._passthrough)
        self._session = session.Session(tree, config.mountpoint, allow_other=config.allow_other)
        self._gauges = Gauges(self._metrics, self._reporter, self._supervisor, staging)

    def _engine_changed(self) -> None:
        """The engine has changed the journal: wake who waits, and drop the pins of what is over."""
        self._journal.note_commit()
        self._tracker.forget_ended()
        self._releaser.wake()

    def _close_save(self, close: CloseSave) -> None:
        try:
            self._closes[0].send_nowait(close)
        except trio.WouldBlock:
            pass  # it is sent again until the save is closed

    async def _close_saves(self) -> None:
        """Close what other members have closed."""
        async for close in self._closes[1]:
            await persist(partial(self._tracker.close_from, close), "closing")

    async def _first_look(self) -> None:
        """Wait until other members were looked at, but not for a store that does not answer."""
        if self._config.membership.count > 1 and not self._supervisor.figures.blocked:
            with trio.move_on_after(_FIRST_LOOK):
                await self._supervisor.looked.wait()

    # ---- the service around it

    async def _announce(self, ready: Callable[[], None]) -> None:
        config = self._config
        await self._passthrough.wait_settled(self._staging.root / "lock")
        self._metrics.set_data_path(self._passthrough.mode.value)
        self._passthrough.changed = self._data_path_changed
        _log.info(
            "mounted",
            mountpoint=str(config.mountpoint),
            store=self._store_url,
            staging=str(config.staging),
            publishing=self._supervisor.figures.blocked or "yes",
            data_path=self._passthrough.shown,
        )
        notify.ready(await self._summary())
        ready()

    def _data_path_changed(self) -> None:
        self._metrics.set_data_path(self._passthrough.mode.value)
        _log.warning("the data path changed", data_path=self._passthrough.shown)

    async def _summary(self) -> str:
        status = await self._reporter.status()
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

    async def _tell_status(self) -> None:
        """Keep the line up to date that the service manager shows. Not the watchdog: this waits for a thread."""
        while True:
            await trio.sleep(5.0)
            notify.status(await self._summary())

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

    async def _mirror_open_files(self) -> None:
        """Have loose files mirrored while they are being written: a log is closed with the training."""
        while True:
            await trio.sleep(self._config.loose_interval)
            for path in self._detector.open_loose():
                self._supervisor.loose(path)

    async def _drain(self) -> None:
        if not self._config.publish:
            return
        with self._stop_drain, trio.move_on_after(self._config.drain_timeout):
            notify.extend_timeout(self._config.drain_timeout + _ENDING)
            await self._reporter.settled()

    def _report_pending(self) -> None:
        left, publish, reasons = self._reporter.pending(), self._config.publish, self._tracker.open_saves()
        with self._journal.read() as txn:
            # Of a foreign attempt nothing is on this disk.
            closed = [a for a in txn.attempts.scan() if a.closed_at is not None and not a.state.final and not a.foreign]
            shards = [s for a in closed for s in txn.shards_of(a.attempt) if s.pin is None]
        if unfinished := left.open if publish else left.open + left.closing:
            first = unfinished[0]
            _log.warning("saves are left open", saves=len(unfinished), first=first, waiting=reasons.get(first, ""))
        if publish and (closed or left.closing):
            size = sum(shard.identity.size for shard in shards)
            closing = "".join(f"; {path}, waiting: {reasons.get(path, 'its pins')}" for path in left.closing[:1])
            raise PendingError(
                f"stopped with {len(closed) + len(left.closing)} generations not published: {len(shards)} files, {size}"
                f" bytes not in the store yet{closing}",
                hint="they are kept in staging; the next start goes on",
            )
