"""Every metric that cachefs exports, and the endpoint that Prometheus reads. The only user of prometheus_client.

Each `Metrics` has a registry of its own: two daemons in one process (tests) never share a counter. Other modules set
the attributes; the README's table is made from them (`python -m cachefs.metrics` prints it).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Thread
from typing import Final
from wsgiref.simple_server import WSGIServer

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from cachefs import __version__
from cachefs.errors import InvalidError
from cachefs.formats.records import State

DATA_PATHS: Final = ("kernel", "python")
"""How reads and writes are served: by the kernel, or through the daemon."""

# One more series for each counter, which nobody asked for. The switch is the library's, for the whole process.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SAVE_SECONDS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)


class Row(msgspec.Struct, frozen=True):
    """One metric as Prometheus shows it, for the README."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Metrics:
    """The metrics of one daemon. Bytes, seconds and files are in the name; counters never fall.

    Values that only exist when somebody asks (the age of the oldest save, free space) may be given as a callback with
    `gauge.set_function`; it is called from the endpoint's thread.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.rows: list[Row] = []

        self.backlog_bytes = self._gauge("backlog_bytes", "Bytes of closed saves that are not in the store yet")
        self.backlog_files = self._gauge("backlog_files", "Files of closed saves that are not in the store yet")
        self.oldest_unpublished_seconds = self._gauge(
            "oldest_unpublished_seconds",
            "Age of the oldest closed save that is not published yet, 0 when there is none",
        )
        self.oldest_open_seconds = self._gauge(
            "oldest_open_seconds",
            "Time since the last change of the save that is not closed and was left alone for the longest time, or 0",
        )
        self.close_to_published_seconds = Histogram(
            *self._row("close_to_published_seconds", "histogram", "Time from the close of a save to its publication"),
            buckets=_SAVE_SECONDS,
            registry=self.registry,
        )
        self.generations = self._gauge("generations", "Generations that this daemon knows, by state", "state")
        self.abandoned = self._counter("abandoned_total", "Saves that will never be published, by reason", "reason")
        self.flushed_bytes = self._counter("flushed_bytes_total", "Bytes that the store has acknowledged")
        self.upload_retries = self._counter("upload_retries_total", "Uploads tried again, by reason", "reason")
        self.orphans_aborted = self._counter(
            "orphaned_uploads_aborted_total", "Uploads in parts that a killed daemon left and this one aborted"
        )
        self.store_requests = self._counter(
            "store_requests_total", "Requests to the store, by operation and outcome", "operation", "outcome"
        )
        self.store_healthy = self._gauge("store_healthy", "1 when the last request to the store got an answer, else 0")
        self.publishing = self._gauge("publishing", "1 when saves are published, 0 when they are only flushed")
        self.epoch = self._gauge(
            "epoch", "Ownership epoch that this daemon holds of a run, 0 when it is not the owner", "run"
        )
        self.fenced = self._gauge("fenced", "1 when another owner has taken the run over, else 0", "run")
        self.data_path = self._gauge("data_path", "1 for the way that reads and writes are served, else 0", "mode")
        self.loose_pending_files = self._gauge("loose_pending_files", "Loose files that wait to be mirrored")
        self.staging_free_bytes = self._gauge("staging_free_bytes", "Free bytes of the staging file system")
        self.staging_used_bytes = self._gauge("staging_used_bytes", "Used bytes of the staging file system")
        self.gc_passes = self._counter("gc_passes_total", "Passes of garbage collection that came to their end")
        self.gc_failures = self._counter("gc_failures_total", "Passes of garbage collection that an error ended")
        self.gc_deleted = self._counter("gc_deleted_objects_total", "Object versions that garbage collection deleted")
        self.gc_freed_bytes = self._counter("gc_freed_bytes_total", "Bytes that garbage collection freed in the store")
        self.engine_restarts = self._gauge("engine_restarts", "How often the engine process was started again")
        self.fsyncs = self._counter("fsyncs_total", "Calls of fsync answered to training code")
        self.loop_lag_seconds = self._gauge("loop_lag_seconds", "How late the event loop woke up at the last look")

        info = self._gauge("info", "Always 1; the version is in the label", "version")
        info.labels(version=__version__).set(1)
        for state in State:
            self.generations.labels(state=state.value).set(0)
        ProcessCollector(registry=self.registry)

    def set_data_path(self, mode: str) -> None:
        """Say which of DATA_PATHS serves reads and writes. Raises ValueError for any other."""
        if mode not in DATA_PATHS:
            raise ValueError(f"unknown data path {mode!r}")
        for known in DATA_PATHS:
            self.data_path.labels(mode=known).set(known == mode)

    def _row(self, name: str, kind: str, text: str, *labels: str) -> tuple[str, str, tuple[str, ...]]:
        name = f"cachefs_{name}"
        self.rows.append(Row(name, kind, labels, text))
        return name, text, labels

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(*self._row(name, "gauge", text, *labels), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(*self._row(name, "counter", text, *labels), registry=self.registry)


class Server:
    """A running endpoint. `address` is the (host, port) it really listens on; `close` frees the port."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread = server, thread
        host, port = server.server_address[:2]
        self.address = (str(host), int(port))

    def close(self) -> None:
        """Stop answering and wait for the thread to end. Harmless when called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(address: tuple[str, int], registry: CollectorRegistry) -> Server:
    """Answer `GET /metrics` on (host, port) from a thread of its own; port 0 takes a free one.

    Raises InvalidError when the address is in use or cannot be bound.
    """
    host, port = address
    try:
        return Server(*start_http_server(port, addr=host, registry=registry))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidError(
            f"metrics = '{host}:{port}': {reason}",
            hint="set `metrics` to another HOST:PORT for this mount, or to off",
        ) from error


def table(rows: Sequence[Row]) -> str:
    """Return the markdown table of the README."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {row.help} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(Metrics().rows))
