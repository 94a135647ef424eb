"""The rules of publication, pure: no I/O, no clock, no randomness. PROTOCOL.md explains them.

Pointer: `grant`, `announce`, `end`, `promote`, `rollback` and `retire` return the next body. Each is written
with the ETag of the version it was computed from, so the check made here and the write are one atomic step.
Unclear writes: `classify_cas` says what reading the pointer proves (create-only writes: store/createonly.py).
Attempts: `next_step` says what an attempt needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

import msgspec

from cachefs.errors import CorruptError, FencedError, InvalidError
from cachefs.formats.pointer import Kind, OpenAttempt, Pointer, Published
from cachefs.formats.records import AttemptRecord, RunRecord, State
from cachefs.restore.reader import Seen


class Already(msgspec.Struct, frozen=True):
    """The pointer names this attempt: an earlier copy of the same promotion has landed."""

    published: Published


class Refused(msgspec.Struct, frozen=True):
    """The attempt can never be promoted; the attempt is abandoned for `reason`."""

    reason: str


class NotOpen(Refused, frozen=True):
    """Refused because the pointer does not list the attempt. That is final only where an earlier version lists it: a
    read may come from a replica that has not got the announcement yet.
    """


def grant(run: str, current: Seen | None, *, owner: str, nonce: str, at: str) -> Pointer:
    """Return the pointer that gives the run to `owner` under the next epoch; what is published stays."""
    if current is None:
        return Pointer(run=run, kind="grant", seq=1, epoch=1, owner=owner, nonce=nonce, at=at)
    return _next(current, "grant", nonce, at, epoch=current.pointer.epoch + 1, owner=owner)


def announce(
    current: Seen, attempt: OpenAttempt, *, ended: Collection[str], owner: str, epoch: int, nonce: str, at: str
) -> Pointer | Refused | None:
    """Return the pointer that lists `attempt` as open and leaves out those in `ended`; None when it is listed already.

    Only what is listed can be promoted. Raises FencedError when the run does not belong to this owner in this epoch.
    """
    old = current.pointer
    _check_holds(old, owner, epoch)
    if any(entry.attempt == attempt.attempt for entry in old.open):
        return None
    if attempt.attempt in old.retired:
        return Refused(f"attempt {attempt.attempt} was retired by garbage collection")
    left = tuple(entry for entry in old.open if entry.attempt not in ended)
    return _next(current, "open", nonce, at, open=(*left, attempt))


def end(current: Seen, ended: Collection[str], *, owner: str, epoch: int, nonce: str, at: str) -> Pointer | None:
    """Return the pointer that no longer lists the attempts in `ended`; None when it lists none of them.

    Raises FencedError when the run does not belong to this owner in this epoch.
    """
    old = current.pointer
    _check_holds(old, owner, epoch)
    left = tuple(entry for entry in old.open if entry.attempt not in ended)
    return None if left == old.open else _next(current, "end", nonce, at, open=left)


def _check_holds(pointer: Pointer, owner: str, epoch: int) -> None:
    if not holds(pointer, owner, epoch):
        hint = "restart this daemon to take the run over"
        raise FencedError(f"run {pointer.run!r} belongs to {holder(pointer)}", hint=hint)


def _next(current: Seen, kind: Kind, nonce: str, at: str, **changes: Any) -> Pointer:
    """Return the pointer that replaces the one seen; what is not in `changes` stays."""
    old = current.pointer
    fixed = {"kind": kind, "seq": old.seq + 1, "nonce": nonce, "at": at, "prev": current.prev, "rollback_of": None}
    return msgspec.structs.replace(old, **{**fixed, **changes})


def promote(
    current: Seen, candidate: Published, *, sealed_epoch: int, owner: str, epoch: int, nonce: str, at: str
) -> Pointer | Already | Refused:
    """Return the pointer that publishes `candidate`, or why there is nothing to write.

    Raises FencedError when the run does not belong to this owner in this epoch (I7), and for a manifest that was sealed
    under another epoch: an attempt is adopted by sealing it again.
    """
    old = current.pointer
    if old.published is not None and old.published.attempt == candidate.attempt:
        return Already(old.published)
    _check_holds(old, owner, epoch)
    if sealed_epoch != epoch:
        raise FencedError(f"{candidate.generation} was sealed under epoch {sealed_epoch}, the run is at epoch {epoch}")
    if candidate.attempt in old.retired:
        return Refused(f"attempt {candidate.attempt} was retired by garbage collection")
    if old.published is not None and candidate.order <= old.published.order:
        return Refused(
            f"superseded: step {candidate.order.step} is not newer than the published step "
            f"{old.published.order.step} ({old.published.generation}): an older step never replaces a newer one"
        )
    left = tuple(entry for entry in old.open if entry.attempt != candidate.attempt)
    if left == old.open:
        return NotOpen(f"attempt {candidate.attempt} is not open any more: it was ended by a rollback or by its owner")
    return _next(current, "promote", nonce, at, published=candidate, open=left)


def rollback(
    current: Seen, target: Published, *, retired: Collection[str] = (), nonce: str, at: str
) -> Pointer | Already | Refused:
    """Return the pointer that names `target`, an older generation, again. Epoch and owner stay; every attempt that is
    open is ended, or its promotion would undo the rollback.

    `retired` are attempts that other versions of the pointer have listed as retired since `target` was checked.
    """
    old = current.pointer
    if old.published is None:
        return Refused(f"run {old.run!r} has nothing published to roll back from")
    if old.published.attempt == target.attempt:
        return Already(old.published)
    if target.attempt in old.retired or target.attempt in retired:
        return Refused(f"{target.generation} (attempt {target.attempt}) was retired by garbage collection")
    return _next(current, "rollback", nonce, at, published=target, open=(), rollback_of=old.published.attempt)


def retire(
    current: Seen, attempts: Collection[str], *, swept: Collection[str] = (), nonce: str, at: str
) -> Pointer | None:
    """Return the pointer that lists `attempts` as retired and no longer lists those in `swept`, of which nothing is
    left; None when that changes nothing.

    Raises InvalidError for an attempt that is published or open: no such attempt may be deleted (I14).
    """
    old = current.pointer
    living = {entry.attempt for entry in old.open} | ({old.published.attempt} if old.published else set())
    if wrong := living.intersection(attempts):
        raise InvalidError(f"attempts that are open or published cannot be retired: {', '.join(sorted(wrong))}")
    left = tuple(attempt for attempt in old.retired if attempt not in swept)
    new = (*left, *sorted(set(attempts).difference(left)))
    return None if new == old.retired else _next(current, "retire", nonce, at, retired=new)


def ended_by(last: Pointer | None) -> str:
    """Return why an attempt is not open any more that `last` has taken off the list; None: it is not known which."""
    if last is not None and last.kind == "rollback" and last.published is not None:
        return f"it was ended by the rollback to {last.published.generation} of {last.at}"
    return "its owner has ended it"


def holds(pointer: Pointer, owner: str, epoch: int) -> bool:
    """Return whether the pointer gives the run to this owner in this epoch."""
    return pointer.epoch == epoch and pointer.owner == owner


def holder(pointer: Pointer) -> str:
    """Return the owner that a pointer names, for messages and RunRecord.fenced_by."""
    return f"{pointer.owner} (epoch {pointer.epoch})"


def check_known(run: str, current: Seen | None, record: RunRecord | None) -> None:
    """Check a pointer against what the journal remembers of the run (I6: epochs never fall).

    Raises CorruptError when the pointer is older than that, or not there although there was one.
    """
    known = record.epoch if record else 0
    if known and current is None:
        raise hidden(run)
    if current is not None and current.pointer.epoch < known:
        raise CorruptError(
            f"the pointer of run {run!r} is at epoch {current.pointer.epoch}, but this daemon has held epoch {known}",
            hint="the bucket was replaced or its pointer overwritten from outside; publication of this run is halted",
        )


def hidden(run: str) -> CorruptError:
    """Return the error for a pointer that existed and cannot be seen: the run is halted, never bootstrapped again."""
    return CorruptError(
        f"the pointer of run {run!r} existed and is gone: deleted, or hidden by a delete marker",
        hint="delete the marker of pointer.json by its version id; publication of this run is halted until then",
    )


def broken(run: str, seq: int) -> CorruptError:
    """Return the error for a history that ends before the version that is needed."""
    return CorruptError(f"the history of run {run!r} does not reach back to seq {seq}")


class Cas(Enum):
    """What reading the pointer says about an unclear compare-and-swap."""

    LANDED = "the pointer is ours"
    SUPERSEDED = "ours has landed and was replaced since"
    LOST = "another write took the place of ours: it can no longer land"
    UNDECIDED = "the version it replaces is still current: send the identical request again"
    HIDDEN = "there was a pointer and now there is none"
    WALK = "append the version that the last one replaced, and ask again"


def classify_cas(ours: Pointer, chain: Sequence[Seen | None]) -> Cas:
    """Decide about a swap from the pointer's versions, newest first: `chain` holds the current one, then its
    predecessors as far as WALK asked for them; a None after the first means the store no longer has it.

    The ETag that `ours` waits for is a hash of a body that is never written twice (I8): once it is not current, `ours`
    either is among the successors or can never land.
    """
    current, last, prev = chain[0], chain[-1], ours.prev
    if current is None:
        return Cas.UNDECIDED if prev is None else Cas.HIDDEN
    if current.pointer.nonce == ours.nonce:
        return Cas.LANDED
    # Older than what ours replaces: a read from a lagging replica, which proves nothing.
    if prev is not None and (current.etag == prev.etag or current.pointer.seq < prev.seq):
        return Cas.UNDECIDED
    if last is None:
        raise broken(ours.run, ours.seq)
    if last.pointer.nonce == ours.nonce:
        return Cas.SUPERSEDED
    return Cas.LOST if last.pointer.seq <= ours.seq else Cas.WALK


class Step(Enum):
    """What an attempt needs next. Each step is one effect in the store, then its result in the journal."""

    WAIT = "wait"
    OPEN = "open"
    REPORT = "report"
    SEAL = "seal"
    TEST = "test"
    PROMOTE = "promote"
    DONE = "done"


def next_step(attempt: AttemptRecord, epoch: int, *, publish: bool = True) -> Step:
    """Return the next step of an attempt for a process that holds `epoch` of its run.

    Without `publish` attempts are opened, so that they are flushed, and nothing more. An attempt that was sealed under
    an earlier epoch is adopted: sealed, tested and promoted again under this one.
    """
    if attempt.state.final:
        return Step.DONE
    if attempt.shared:
        return Step.WAIT  # another record of ours, or another daemon, drives it
    if attempt.opened_epoch is None:
        return Step.OPEN
    if attempt.state.rank < State.FLUSHED.rank or not publish:
        return Step.WAIT
    if attempt.report is None and not attempt.foreign:
        return Step.REPORT
    if not attempt.complete:
        return Step.WAIT
    if attempt.state is State.FLUSHED or attempt.sealed_epoch != epoch:
        return Step.SEAL
    return Step.TEST if attempt.state is State.SEALED else Step.PROMOTE


def next_attempt(
    attempts: Sequence[AttemptRecord], epoch: int, *, publish: bool = True, undecided: Collection[str] = ()
) -> tuple[AttemptRecord, Step] | None:
    """Return which attempt of a run to work on and its step, or None when all wait.

    Open records first, in serial order, so that ordinals follow the order of the saves. Then the oldest attempt: a
    closed one that is still being flushed holds back those after it, because publishing them first would refuse it for
    its older step; one that is still being written does not, nor one that waits for other members: they send in the
    same order, nor one that has no place in the order yet. A save of an `undecided` generation is not opened: it may
    belong to an attempt that is open already.
    """
    ordered = sorted(attempts, key=lambda attempt: attempt.serial)
    steps = [(attempt, next_step(attempt, epoch, publish=publish)) for attempt in ordered if not attempt.state.final]
    for attempt, step in steps:
        if step is Step.OPEN and (attempt.foreign or attempt.generation not in undecided):
            return attempt, step
    for attempt, step in steps:
        if step not in (Step.WAIT, Step.OPEN):
            return attempt, step
        if step is Step.WAIT and attempt.closed_at is not None and attempt.state.rank < State.FLUSHED.rank:
            return None
    return None


def effective_state(attempt: AttemptRecord, run: RunRecord | None) -> State:
    """Return the state to show: `fenced` for an attempt that is not final in a run that another process has taken."""
    if run is not None and run.fenced_by and not attempt.state.final:
        return State.FENCED
    return attempt.state


def releasable(attempts: Sequence[AttemptRecord]) -> list[str]:
    """Return the attempts of one run whose local bytes may be dropped (I19): published ones, and abandoned ones once a
    later save or a later step of the run is published.
    """
    published = [attempt for attempt in attempts if attempt.state is State.PUBLISHED]
    serial = max((attempt.serial for attempt in published), default=-1)
    step = max((attempt.step for attempt in published), default=-1)
    return [
        attempt.attempt
        for attempt in attempts
        if attempt.state is State.PUBLISHED
        or (attempt.state is State.ABANDONED and (attempt.serial < serial or attempt.step < step))
    ]
