"""What the daemon says about itself: to `cachefs status`, to the metrics, to the service manager. Built from the
journal.

`Status` is also the JSON of `cachefs status --json`; fields are only ever added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from cachefs.formats.records import AttemptRecord, RunRecord, ShardRecord, State
from cachefs.journal import Txn
from cachefs.problem import Problem
from cachefs.publish.rules import effective_state


class GenerationStatus(msgspec.Struct, frozen=True):
    """One attempt. Sizes in bytes, `age` in seconds since it was closed (or opened, while it is open). `preset` is ""
    as long as nothing proves which one it is. `complete`: its close signal came, so a flush waits for it; of one that
    is abandoned, that it was closed by then. `cancelled`: the training removed or renamed it before it was closed.
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
    complete: bool = False
    cancelled: bool = False


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
    knows. `open` are saves that are not complete, by path, and what each waits for. `lost` are complete ones that were
    abandoned meanwhile, by path, and why; the command line finds them (`lost`), for it may ask more than once.
    """

    published: int
    abandoned: int = 0
    open: dict[str, str] = {}
    lost: dict[str, str] = {}


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
    attempt: AttemptRecord,
    totals: Totals,
    run: RunRecord | None,
    *,
    now: float,
    waiting: str = "",
    closing: bool = False,
) -> GenerationStatus:
    """Return the status of one attempt. `closing` says that its close signal came while it is open."""
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
        complete=attempt.closed_at is not None or (closing and attempt.state is State.OPEN),
        cancelled=attempt.cancelled,
    )


def lost(before: Status, after: Status) -> dict[str, str]:
    """Return the complete saves that were abandoned between two looks, by path, and why.

    Not lost is what the training itself has dropped before it was closed, nor what a later save of the path has
    replaced that is published.
    """
    then = {one.attempt: one for one in before.generations}
    found: dict[str, str] = {}
    for one in after.generations:  # in the order they were opened
        known = then.get(one.attempt)
        complete = one.complete or (known is not None and known.complete)
        if one.state is State.PUBLISHED:
            found.pop(one.path, None)
        elif known is not None and known.state is State.ABANDONED:
            continue
        elif one.state is State.ABANDONED and complete and not one.cancelled:
            found[one.path] = one.error
    return found


def snapshot(
    seen: Read, *, now: float, waiting: Mapping[str, str] | None = None, closing: Collection[str] = ()
) -> Snapshot:
    """Return the journal's part of a status. `waiting` says by path what an open save waits for, `closing` are the
    paths of those whose close signal came.
    """
    backlog_bytes = backlog_files = 0
    oldest = 0.0
    generations = []
    for attempt in seen.attempts:
        totals = seen.totals.get(attempt.attempt, Totals())
        status = generation_status(
            attempt,
            totals,
            seen.runs.get(attempt.run),
            now=now,
            waiting=(waiting or {}).get(attempt.path, ""),
            closing=attempt.path in closing,
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
