"""Back to an older generation: one swap of the pointer.

The caller holds a lease on the target and has validated it since (restore/leases.py), so that garbage collection
cannot have taken it from under the pointer. Attempts that are open are ended by the same swap: one that finished later
would undo the rollback. Their members find out at their next looks, or at the promotion; what is announced afterwards
is published as ever, since the order of promotion looks at what is published now.
"""

from __future__ import annotations

import msgspec

from cachefs.errors import ConditionFailed, NotFoundError
from cachefs.formats.pointer import OpenAttempt, Pointer, Published
from cachefs.publish import rules
from cachefs.publish.promotion import Identity
from cachefs.publish.rules import Already, Cas, Refused
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen


class RolledBack(msgspec.Struct, frozen=True):
    """The pointer that was written, what was published before, the attempts that were ended, and what is published
    now: another generation, if one was promoted since.
    """

    pointer: Pointer
    left: Published | None
    ended: tuple[OpenAttempt, ...]
    now: Published | None


async def rollback(writes: Writes, run: str, seen: Seen, target: Published, who: Identity) -> RolledBack | Already:
    """Make the run's pointer name `target` again, and read it back; Already when it is what the pointer names.

    `seen` is the pointer at which `target` was found, before it was validated; epoch and owner stay. May be repeated.
    Raises NotFoundError when garbage collection has retired the target since, CorruptError when the pointer is gone or
    its history does not reach back to `seen`, and the store's errors.
    """
    retired: set[str] = set()
    retries = 0
    while True:
        ours = rules.rollback(seen, target, retired=retired, nonce=who.nonce(), at=who.at())
        if isinstance(ours, Refused):
            raise NotFoundError(ours.reason, hint="cachefs ls shows what can be rolled back to")
        if isinstance(ours, Already):
            return ours
        swap = await writes.swap(run, ours)
        if swap.outcome is not Cas.LOST:
            return RolledBack(ours, seen.pointer.published, seen.pointer.open, swap.current.pointer.published)
        await writes.pause(ConditionFailed(f"the pointer of run {run!r} was replaced meanwhile"), retries)
        retries += 1
        before, seen = seen, await writes.standing_pointer(run)
        retired.update(await _retired_since(writes, run, seen, before))


async def _retired_since(writes: Writes, run: str, seen: Seen, before: Seen) -> set[str]:
    """Return what the pointer has listed as retired after `before`: an attempt that was deleted is listed no more."""
    found: set[str] = set()
    at: Seen | None = seen
    while at is not None and at.pointer.seq > before.pointer.seq:
        found.update(at.pointer.retired)
        at = await writes.before(run, at)
    if at is None:
        raise rules.broken(run, before.pointer.seq)
    return found
