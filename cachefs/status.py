"""What the daemon says about itself: to `cachefs status`, to the metrics, to the service manager. Built from the
journal.

`Status` is also the JSON of `cachefs status --json`; fields are only ever added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cachefs.formats.records import AttemptRecord, RunRecord, ShardRecord, State
from cachefs.journal import Txn
from cachefs.problem import Problem
from cachefs.publish.rules import effective_state


class GenerationStatus(msgspec.Struct, frozen=True):
    """One attempt. Sizes in bytes, `age` in seconds since it was closed (or opened, while it is open). `preset` is ""
    as long as nothing proves which one it is.
    """

    path: str
    run: str
    generation: str
    attempt: str
    step: int
    preset: str
    state: State
    files: int
    files_flushed: int
    bytes: int
    bytes_flushed: int
    age: float
    error: str = ""
    waiting: str = ""


class RunStatus(msgspec.Struct, frozen=True):
    """One run: the epoch this daemon holds (0: none), who fenced it (empty: nobody)."""

    run: str
    epoch: int
    fenced_by: str


class Status(msgspec.Struct, frozen=True):
    """The whole daemon. `publishing_blocked` says why nothing is published (empty: all is well). `members` are the
    names of all members where they are known, `owner` says whether this daemon seals and promotes. `problems` say why
    runs do not move: what could not be read or written at the last look at them. `oldest_open_idle` is how long an open
    save has not changed, at most.
    """

    version: str
    pid: int
    mountpoint: str
    store: str
    staging: str
    member: str
    data_path: str
    publishing_blocked: str
    store_health: str
    backlog_bytes: int
    backlog_files: int
    oldest_unpublished_age: float
    loose_pending: int
    staging_free_bytes: int
    runs: tuple[RunStatus, ...]
    generations: tuple[GenerationStatus, ...]
    members: tuple[str, ...] = ()
    member_count: int = 1
    owner: bool = True
    problems: tuple[Problem, ...] = ()
    oldest_open_idle: float = 0.0


class Flushed(msgspec.Struct, frozen=True):
    """Nothing is pending: how many generations are published and how many were abandoned, of those that the daemon
    knows. `open` are saves that are not complete, by path, and what each waits for.
    """

    published: int
    abandoned: int = 0
    open: dict[str, str] = {}


class Snapshot(msgspec.Struct, frozen=True):
    """The part of a status that comes from the journal."""

    backlog_bytes: int
    backlog_files: int
    oldest_unpublished_age: float
    runs: tuple[RunStatus, ...]
    generations: tuple[GenerationStatus, ...]


class Totals(msgspec.Struct, frozen=True):
    """What the shard records of an attempt add up to. Sizes in bytes; `error` is the first of theirs."""

    files: int = 0
    files_flushed: int = 0
    bytes: int = 0
    bytes_flushed: int = 0
    error: str = ""


class Read(msgspec.Struct, frozen=True):
    """What a status needs of the journal: the attempts in the order they were opened, and their totals by id."""

    attempts: tuple[AttemptRecord, ...] = ()
    totals: Mapping[str, Totals] = {}
    runs: Mapping[str, RunRecord] = {}


def add_up(shards: Iterable[ShardRecord]) -> Totals:
    """Add up the shard records of one attempt."""
    files = flushed = size = sent = 0
    error = ""
    for shard in shards:
        files += 1
        size += shard.identity.size
        error = error or shard.error
        if shard.pin is not None:
            flushed += 1
            sent += shard.identity.size
    return Totals(files, flushed, size, sent, error)


def read(txn: Txn) -> Read:
    """Read the journal, every shard record of it: some 10 us each, so not for the event loop."""
    attempts = tuple(sorted(txn.attempts.scan(), key=lambda record: record.serial))
    # Those of a published attempt are gone, or will be in a moment.
    live = [attempt.attempt for attempt in attempts if attempt.state is not State.PUBLISHED]
    return Read(
        attempts=attempts,
        totals={attempt: add_up(txn.shards.scan(f"{attempt}/")) for attempt in live},
        runs={run.run: run for run in txn.runs.scan()},
    )


def generation_status(
    attempt: AttemptRecord, totals: Totals, run: RunRecord | None, *, now: float, waiting: str = ""
) -> GenerationStatus:
    """Return the status of one attempt."""
    files, size = totals.files_flushed, totals.bytes_flushed
    if attempt.state is State.PUBLISHED:  # its shard records are gone
        files, size = attempt.files, attempt.size
    since = attempt.closed_at if attempt.closed_at is not None else attempt.opened_at
    return GenerationStatus(
        path=attempt.path,
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.attempt,
        step=attempt.step,
        preset=attempt.preset,
        state=effective_state(attempt, run),
        files=attempt.files or totals.files,
        files_flushed=files,
        bytes=attempt.size or totals.bytes,
        bytes_flushed=size,
        age=max(0.0, now - since),
        error=attempt.error or totals.error,
        waiting=waiting,
    )


def snapshot(seen: Read, *, now: float, waiting: Mapping[str, str] | None = None) -> Snapshot:
    """Return the journal's part of a status. `waiting` says by path what an open save waits for."""
    backlog_bytes = backlog_files = 0
    oldest = 0.0
    generations = []
    for attempt in seen.attempts:
        totals = seen.totals.get(attempt.attempt, Totals())
        status = generation_status(
            attempt, totals, seen.runs.get(attempt.run), now=now, waiting=(waiting or {}).get(attempt.path, "")
        )
        generations.append(status)
        if attempt.closed_at is not None and not attempt.state.final:
            oldest = max(oldest, now - attempt.closed_at)
            backlog_bytes += status.bytes - status.bytes_flushed
            backlog_files += status.files - status.files_flushed
    return Snapshot(
        backlog_bytes=backlog_bytes,
        backlog_files=backlog_files,
        oldest_unpublished_age=oldest,
        runs=tuple(RunStatus(run.run, run.epoch, run.fenced_by) for run in seen.runs.values()),
        generations=tuple(generations),
    )
