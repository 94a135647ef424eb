"""What a look at other members leaves in the journal: each function is one transaction, or part of one, and reads the
record again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from cachefs.formats.pointer import Published
from cachefs.formats.records import AttemptRecord, SharedRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish import joining
from cachefs.publish.joining import Join, Refuse
from cachefs.publish.steps import record_published, update

REPORTED = "has reported; waits for the owner and other members"
"""What a save of this member waits for, as the status shows it."""


def shared(journal: Journal, run: str) -> Sequence[SharedRecord]:
    """Return the attempts of a run that others opened, the oldest first."""
    with journal.read() as txn:
        found = [record for record in txn.shared.scan() if record.run == run]
    return sorted(found, key=lambda record: (record.epoch, record.ordinal))


def saves(journal: Journal, run: str) -> Sequence[AttemptRecord]:
    """Return this member's saves of a run, the oldest first."""
    with journal.read() as txn:
        found = [save for save in txn.attempts.scan() if save.run == run and not save.foreign]
    return sorted(found, key=lambda save: save.serial)


def undecided(record: SharedRecord) -> bool:
    """Return whether this member still has to find out if it has a part in an attempt."""
    return not record.local and record.report is None and not record.refused


def put(record: SharedRecord, txn: Txn) -> None:
    """Record what was found out about an attempt."""
    txn.shared.put(record.attempt, record)


def found(record: SharedRecord, incarnation: str, txn: Txn) -> None:
    """Record an attempt that is new here, and whether it is older than anything that was written in this mount: whether
    the daemon `incarnation` has not let the mount serve yet.
    """
    before = bool(incarnation) and txn.about().serving != incarnation
    txn.shared.put(record.attempt, msgspec.structs.replace(record, before=before))


def looked(run: str, seq: int, txn: Txn) -> None:
    """Record a look at a run, and the pointer that it saw."""
    txn.update_run(run, looked=True, seq=seq)


def forget_foreign(run: str, txn: Txn) -> None:
    """Forget the attempts of other members that this daemon drove as an owner."""
    for save in list(txn.attempts.scan()):
        if save.run == run and save.foreign and not save.state.final:
            txn.attempts.delete(save.attempt)


def join(decision: Join, txn: Txn) -> None:
    """Make a save part of an attempt, if neither is over."""
    attempt, local = decision.shared, decision.local
    record, save = txn.shared.get(attempt), txn.attempts.get(local)
    if record is None or save is None or save.state.final:
        return
    txn.shared.put(attempt, msgspec.structs.replace(record, local=local))
    _note_ended(txn, record, ended=False)
    txn.update_attempt(
        local,
        shared=attempt,
        opened_epoch=record.epoch,
        ordinal=record.ordinal,
        members=record.members,
        count=record.count,
        error="",
    )


def refuse(decision: Refuse, txn: Txn) -> None:
    """Record that this member cannot take part, and end the saves that can belong to no attempt."""
    record = txn.shared.get(decision.shared)
    if record is not None:
        txn.shared.put(decision.shared, msgspec.structs.replace(record, refused=decision.reason))
    for save in decision.locals:
        update(txn, save, state=State.ABANDONED, error=decision.reason, shared=decision.shared)


def show(attempt: str, why: str, txn: Txn) -> None:
    """Show why a save does not move on."""
    update(txn, attempt, error=why)


def abandon(save: AttemptRecord, reason: str, txn: Txn) -> None:
    """End a save."""
    update(txn, save.attempt, state=State.ABANDONED, error=reason)


def answered(record: SharedRecord, txn: Txn) -> None:
    """Record what this member has reported."""
    txn.shared.put(record.attempt, record)
    if record.local and not record.refused:
        update(txn, record.local, report=record.report, error=REPORTED, retries=0)


def ended(record: SharedRecord, published: Published | None, reason: str, txn: Txn) -> None:
    """Record what became of an attempt, and forget it."""
    txn.shared.delete(record.attempt)
    if record.before and not record.local:
        _note_ended(txn, record, ended=published is None)
    if record.local and published is not None:
        record_published(txn, record.local, published)
    elif record.local:
        update(txn, record.local, state=State.ABANDONED, error=reason)


def _note_ended(txn: Txn, record: SharedRecord, *, ended: bool) -> None:
    """Note that an attempt ended that is older than anything written in this mount; or that this is over."""
    known = txn.run(record.run).ended
    names = tuple(name for name in known if name != record.generation) + (record.generation,) * ended
    if names != known:
        txn.update_run(record.run, ended=names)


def miss(run: str, ended: Collection[str], txn: Txn, *, until: float = float("inf")) -> None:
    """End the saves that an attempt of their name may have needed, which has ended (joining.missed)."""
    saves = [save for save in txn.attempts.scan() if save.run == run and not save.foreign]
    for save in joining.missed(saves, ended, until):
        update(txn, save.attempt, state=State.ABANDONED, error=joining.MISSED)


def tested(attempt: str, epoch: int, txn: Txn) -> None:
    """Record that this member has read its share of the manifest sealed under an epoch."""
    record = txn.shared.get(attempt)
    if record is not None:
        txn.shared.put(attempt, msgspec.structs.replace(record, tested=epoch))
