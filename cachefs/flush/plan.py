"""Decisions of the flush; pure.

S3's limits are those of the user guide, "Amazon S3 multipart upload limits": 1 to 10,000 parts, each but the last at
least 5 MiB, none above 5 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from cachefs.formats.records import AttemptRecord, PartRecord, RunRecord, ShardRecord, State
from cachefs.store.base import PartInfo

MAX_PARTS = 10_000
MIB = 1 << 20


class Range(msgspec.Struct, frozen=True):
    """One part of a file: `number` from 1, `offset` and `length` in bytes."""

    number: int
    offset: int
    length: int


def fit_part_size(size: int, part_size: int) -> int:
    """Return `part_size`, raised to whole MiB where a file of `size` bytes would need more than MAX_PARTS parts."""
    if size <= part_size * MAX_PARTS:
        return part_size
    least = -(-size // MAX_PARTS)
    return -(-least // MIB) * MIB


def parts(size: int, part_size: int) -> list[Range]:
    """Cut a file into parts; an empty file has one empty part. `part_size` comes from `fit_part_size`."""
    starts = range(0, size, part_size) if size else (0,)
    return [Range(number, start, min(part_size, size - start)) for number, start in enumerate(starts, 1)]


def held_parts(
    ranges: Sequence[Range], records: Iterable[PartRecord], listed: Iterable[PartInfo] | None
) -> dict[int, PartInfo]:
    """Return, by number, the parts of an upload that need not be sent again if the file still has these bytes.

    A part is trusted if the journal knows its digest and, where the store was asked (`listed`), ETag, size and, if the
    store reports it, SHA-256 agree. A part that only the store knows has an unchecked digest: it is sent again.
    """
    lengths = {part.number: part.length for part in ranges}
    at_store = None if listed is None else {part.number: part for part in listed}
    held: dict[int, PartInfo] = {}
    for record in records:
        if record.number not in lengths:
            continue
        part = PartInfo(record.number, record.etag, lengths[record.number], record.sha256)
        if at_store is None or _agrees(at_store.get(record.number), part):
            held[part.number] = part
    return held


def _agrees(listed: PartInfo | None, part: PartInfo) -> bool:
    return (
        listed is not None
        and (listed.etag, listed.size) == (part.etag, part.size)
        and listed.sha256 in (None, part.sha256)
    )


# which attempts and shards


def uploads(attempt: AttemptRecord, run: RunRecord | None) -> bool:
    """Return whether files of the attempt may be sent: announced, not at its end, and its run not fenced."""
    return (
        attempt.opened_epoch is not None
        and attempt.state in (State.OPEN, State.STAGED)
        and not (run is not None and run.fenced_by)
    )


def waits(attempt: AttemptRecord, run: RunRecord | None) -> bool:
    """Return whether the attempt is closed and not flushed: what a drain waits for. Announced or not."""
    return (
        attempt.closed_at is not None
        and attempt.state in (State.OPEN, State.STAGED)
        and not (run is not None and run.fenced_by)
    )


def flushed(attempt: AttemptRecord, shards: Iterable[ShardRecord]) -> bool:
    """Return whether a staged attempt is flushed: every shard has its pin, none is early."""
    return (
        attempt.state is State.STAGED
        and attempt.opened_epoch is not None
        and all(shard.pin is not None and not shard.early for shard in shards)
    )


def order(attempts: Iterable[tuple[AttemptRecord, Sequence[ShardRecord]]]) -> dict[str, list[ShardRecord]]:
    """Return, for each run, the shards to send in this order: closed saves first, the oldest first, then by path.

    The input are the attempts for which `uploads` holds. Runs are independent of each other: how many shards of each
    are sent at a time is the caller's limit, so none waits for another.
    """
    queues: dict[str, list[tuple[bool, int, tuple[str, ...], ShardRecord]]] = {}
    for attempt, shards in attempts:
        open_save = attempt.closed_at is None
        for shard in shards:
            if shard.pin is None:
                queues.setdefault(attempt.run, []).append((open_save, attempt.serial, shard.paths, shard))
    return {run: [entry[3] for entry in sorted(queue, key=lambda entry: entry[:3])] for run, queue in queues.items()}


def same_upload(current: ShardRecord | None, sent: ShardRecord) -> bool:
    """Return whether the journal still wants what was sent: the same bytes under the same key.

    A file hash that was filled in meanwhile, the step from early to final, and a pin that became a copy of its file
    change nothing.
    """
    if current is None or current.pin is not None:
        return False
    now, then = current.identity, sent.identity
    return (now.size, now.mtime_ns, current.key) == (then.size, then.mtime_ns, sent.key)


# back-off


class Backoff(msgspec.Struct, frozen=True):
    """How long to leave something alone. `until` is monotonic seconds; `failures` counts those in a row."""

    failures: int = 0
    until: float = 0.0

    def failed(self, now: float, *, base: float, cap: float, jitter: Callable[[float], float]) -> Backoff:
        """Return the state after a failure: wait `base` seconds, doubled with every failure up to `cap`, jittered.

        Failures of requests that were under way when the wait began belong to the same failure and count once.
        """
        if now < self.until:
            return self
        wait = min(cap, base * 2.0 ** min(self.failures, 32))
        return Backoff(self.failures + 1, now + jitter(wait))
