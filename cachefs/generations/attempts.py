"""What becomes of an attempt in the journal, as far as the mount process writes it: each function is (part of) one
transaction, reads the record again, and changes nothing that has moved on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cachefs import clock
from cachefs.formats.records import AttemptRecord, ShardRecord, State
from cachefs.generations.actions import CloseSave
from cachefs.generations.closing import ClosedSet
from cachefs.journal import Txn
from cachefs.staging.pins import Pins

HISTORY = 500
"""Attempts that are over and stay in the journal, for `status` and to tell additions to a closed save from a new
one.
"""


def sweep(txn: Txn, pins: Pins) -> None:
    """Drop the pins that no record names: a crash came between the two."""
    for attempt in txn.attempts.scan():
        shards = {shard.shard for shard in txn.shards_of(attempt.attempt)}
        for stray in pins.shards(attempt.attempt) - shards:
            pins.drop(attempt.attempt, stray)
    pins.sweep({attempt.attempt for attempt in txn.attempts.scan()})


def is_over(txn: Txn, attempt: str) -> bool:
    """Return whether an attempt has ended and nothing of it is left to be sent: its pins may go."""
    record = txn.attempts.get(attempt)
    return record is not None and record.state.final and not txn.shards_of(attempt)


ROTATED = "removed from the mount, and nothing is published"
"""Why a save is abandoned where nothing is published."""


def unsent(txn: Txn) -> list[AttemptRecord]:
    """Return what was never announced to the store and waits for nobody but a publisher: `staged`, or abandoned with
    records.
    """
    return [
        attempt
        for attempt in txn.attempts.scan()
        if attempt.opened_epoch is None
        and not attempt.foreign
        and (
            attempt.state is State.STAGED
            or (attempt.state is State.ABANDONED and any(txn.shards.scan(f"{attempt.attempt}/")))
        )
    ]


def end_unsent(txn: Txn, over: Iterable[str]) -> None:
    """End attempts of `unsent` that nobody sees any more, and forget their shards."""
    wanted = set(over)
    for attempt in unsent(txn):
        if attempt.attempt in wanted:
            for shard in txn.shards_of(attempt.attempt):
                txn.drop_shard(shard)
            if not attempt.state.final:
                txn.update_attempt(attempt.attempt, state=State.ABANDONED, error=ROTATED)


def forget(txn: Txn, pins: Pins) -> None:
    """Delete the records of all but the newest HISTORY attempts that are over; the bucket keeps the published ones.

    The record of an attempt with pins stays: they are dropped by it.
    """
    pinned = pins.attempts()
    over = [one for one in txn.attempts.scan() if is_over(txn, one.attempt) and one.attempt not in pinned]
    for attempt in sorted(over, key=lambda record: record.serial)[:-HISTORY]:
        txn.attempts.delete(attempt.attempt)


UNSYNCED = "the machine stopped before the daemon had synced its files: their bytes may be lost"
"""Why a save of an earlier boot is abandoned."""


def abandon_unsynced(txn: Txn, boot: str) -> list[AttemptRecord]:
    """Abandon what was opened in another boot and is not `staged`; return it.

    A power cut keeps what the journal committed, the sizes of files with it, and loses bytes that were not synced
    (delayed allocation: ext4(5), `auto_da_alloc`): neither a marker nor a size tells a torn file then. A closed save
    of which the store has proved every file stands.
    """
    lost = []
    for attempt in list(txn.attempts.scan()):
        if attempt.foreign or attempt.state is not State.OPEN or attempt.boot == boot:
            continue
        if attempt.closed_at is None:
            ended(txn, attempt.attempt, UNSYNCED)
        elif any(shard.pin is None for shard in txn.shards_of(attempt.attempt)):
            txn.update_attempt(attempt.attempt, state=State.ABANDONED, error=UNSYNCED)
        else:
            continue
        lost.append(attempt)
    return lost


def insert(txn: Txn, record: AttemptRecord) -> None:
    """Record a new attempt, and give it its serial and, if its name has none, its step."""
    highest = txn.run(record.run).step
    # A name without a number takes the highest step so far: it is then ordered by when it was opened.
    step = record.step if record.step >= 0 else highest
    txn.update_run(record.run, step=max(highest, step))
    txn.attempts.put(record.attempt, msgspec.structs.replace(record, step=step, serial=txn.next_serial()))


def closed(txn: Txn, attempt: AttemptRecord, action: CloseSave, closed: ClosedSet) -> list[ShardRecord] | None:
    """Record the fixed set of a save; return the early shards that are not part of it.

    None, and nothing recorded, when an early shard that it keeps was dropped meanwhile.
    """
    kept = {shard.shard: shard for shard in closed.shards}
    dropped = []
    recorded = txn.shards_of(attempt.attempt)
    if closed.kept - {current.shard for current in recorded}:
        return None
    for current in recorded:
        if current.shard in kept:
            # The flusher may have moved on meanwhile: its progress stays.
            early = kept[current.shard]
            kept[current.shard] = msgspec.structs.replace(
                current, paths=early.paths, mode=early.mode, xattrs=early.xattrs, early=False
            )
        else:
            txn.drop_shard(current)
            dropped.append(current)
    for shard in kept.values():
        txn.put_shard(shard)
    txn.update_attempt(
        attempt.attempt,
        preset=action.preset,
        signal=action.signal,
        strength=action.strength,
        closed_at=clock.now(),
        rewritten=attempt.rewritten,
        files=len(kept),
        size=sum(shard.identity.size for shard in kept.values()),
        symlinks=closed.symlinks,
        directories=closed.directories,
        trackers=closed.trackers,
        error="",
    )
    return dropped


def ended(txn: Txn, attempt: str, reason: str, *, cancelled: bool = False) -> None:
    """Abandon an attempt that was not closed, and forget its shards. `cancelled`: the training has dropped it."""
    record = txn.attempts.get(attempt)
    if record is None or record.closed_at is not None:
        return
    for shard in txn.shards_of(attempt):
        txn.drop_shard(shard)
    txn.update_attempt(attempt, state=State.ABANDONED, error=reason, cancelled=cancelled)


def written_again(txn: Txn, attempt: str) -> None:
    """Record that a file of an open save was written a second time."""
    record = txn.attempts.get(attempt)
    if record is not None and record.closed_at is None:
        txn.update_attempt(attempt, rewritten=True)


def proved(txn: Txn, attempt: str, signals: Mapping[str, str], torn: bool) -> None:
    """Record the close signals of an open attempt that nothing takes back, and whether a file went after its signal."""
    record = txn.attempts.get(attempt)
    if record is not None and record.closed_at is None:
        txn.update_attempt(attempt, signals=dict(signals), torn=torn)


def noted(txn: Txn, attempt: str, why: str) -> None:
    """Show why an open attempt does not close."""
    record = txn.attempts.get(attempt)
    if record is not None and record.closed_at is None:
        txn.update_attempt(attempt, error=why)
