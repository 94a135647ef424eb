"""The run's pointer: taking an epoch, moving to a candidate, looking back. Talks to the store only, not the journal.

Every function reads the pointer, lets rules.py decide, and writes with the ETag it has read; when another write came
between, it reads and decides again. So there is no check that could be out of date when the write lands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from cachefs import clock
from cachefs.errors import ConditionFailed, UnavailableError
from cachefs.formats.pointer import OpenAttempt, Pointer, Published
from cachefs.formats.records import RunRecord
from cachefs.publish import rules
from cachefs.publish.rules import Already, Cas, NotOpen, Refused
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen


class Identity(msgspec.Struct, frozen=True):
    """Who writes the pointer: `owner` is unique to this process (I9); `nonce` and `at` make fresh values per write."""

    owner: str
    nonce: Callable[[], str] = clock.new_id
    at: Callable[[], str] = clock.timestamp


async def take_epoch(writes: Writes, run: str, who: Identity, record: RunRecord | None) -> int:
    """Take the next epoch of a run for this process and return it; the grant was read back.

    `record` is what the journal knows of the run. Another process may have taken the run over since: the first
    promotion or the next look at the pointer finds out. Raises CorruptError when the pointer is gone or older than the
    journal remembers: then the run is halted.
    """
    retries = 0
    while True:
        seen = await writes.pointer(run)
        rules.check_known(run, seen, record)
        if seen is None:
            await writes.check_never_existed(run)
        elif seen.pointer.owner == who.owner:
            return seen.pointer.epoch  # an earlier grant of this process, whose outcome was left open
        ours = rules.grant(run, seen, owner=who.owner, nonce=who.nonce(), at=who.at())
        swap = await writes.swap(run, ours)
        if swap.outcome is not Cas.LOST:
            return ours.epoch
        await writes.pause(ConditionFailed(f"another process was granted run {run!r} first"), retries)
        retries += 1


async def announce(
    writes: Writes, run: str, attempt: OpenAttempt, who: Identity, *, epoch: int, ended: Collection[str]
) -> Refused | None:
    """List an attempt as open in the run's pointer; returns why it never will be, or None. May be repeated.

    Raises FencedError when the run belongs to another epoch, CorruptError when the pointer is gone.
    """
    while True:
        seen = await writes.standing_pointer(run)
        ours = rules.announce(seen, attempt, ended=ended, owner=who.owner, epoch=epoch, nonce=who.nonce(), at=who.at())
        if ours is None or isinstance(ours, Refused):
            return ours
        if (await writes.swap(run, ours)).outcome is not Cas.LOST:
            return None


async def end(writes: Writes, run: str, ended: Collection[str], who: Identity, *, epoch: int) -> None:
    """Take attempts that will never be published off the pointer's list. May be repeated. Raises as `announce`."""
    while True:
        seen = await writes.standing_pointer(run)
        ours = rules.end(seen, ended, owner=who.owner, epoch=epoch, nonce=who.nonce(), at=who.at())
        if ours is None or (await writes.swap(run, ours)).outcome is not Cas.LOST:
            return


async def promote(
    writes: Writes, run: str, candidate: Published, who: Identity, *, epoch: int, sealed_epoch: int
) -> Published | Refused:
    """Make the run's pointer name `candidate`; returns what it named, read back (I17), or why it never will.

    Raises FencedError when the run belongs to another epoch, CorruptError when the pointer is gone, and
    UnavailableError when a version was read from before the attempt was announced (race 14). Repeating it is harmless:
    an attempt that is published already is a success.
    """
    while True:
        seen = await writes.standing_pointer(run)
        ours = rules.promote(
            seen,
            candidate,
            sealed_epoch=sealed_epoch,
            owner=who.owner,
            epoch=epoch,
            nonce=who.nonce(),
            at=who.at(),
        )
        if isinstance(ours, Already):
            return ours.published
        if isinstance(ours, Refused):
            if published := await published_since(writes, run, seen, candidate.attempt, sealed_epoch):
                return published
            if isinstance(ours, NotOpen) and not await _was_listed(writes, run, seen, candidate):
                raise UnavailableError(f"the pointer of run {run!r} reads older than it is", reason="stale")
            return ours
        swap = await writes.swap(run, ours)
        if swap.outcome in (Cas.LANDED, Cas.SUPERSEDED):
            return candidate


async def _was_listed(writes: Writes, run: str, seen: Seen, candidate: Published) -> bool:
    """Return whether a version since the epoch that opened an attempt lists it, or versions of that time are gone."""
    at: Seen | None = seen
    while at is not None and at.pointer.epoch >= candidate.order.epoch:
        if any(entry.attempt == candidate.attempt for entry in at.pointer.open):
            return True
        if at.pointer.prev is None:
            return False
        at = await writes.before(run, at)
    return at is None


async def published_since(writes: Writes, run: str, seen: Seen, attempt: str, epoch: int) -> Published | None:
    """Return how the pointer named `attempt`, now or in an earlier version of `epoch` or later; None if it never did.

    A manifest sealed under an epoch is promoted under that epoch, so older versions need not be read.
    """
    at: Seen | None = seen
    while at is not None and at.pointer.epoch >= epoch:
        published = at.pointer.published
        if published is not None and published.attempt == attempt:
            return published
        at = await writes.before(run, at)
    return None


class Listed:
    """Which attempts the pointers of runs have listed as open, at any time. Each version is read once."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self._read: dict[str, tuple[int, dict[str, str]]] = {}

    async def ever(self, run: str, seen: Seen) -> Mapping[str, str]:
        """Return the attempts that were listed up to the pointer that was `seen`, as far back as the store keeps
        versions, each with its generation. One that has an open record and was never listed is not under way, or its
        owner died before it could list it.
        """
        newest, found = self._read.get(run, (0, {}))
        at: Seen | None = seen
        while at is not None and at.pointer.seq > newest:
            found.update((entry.attempt, entry.generation) for entry in at.pointer.open)
            at = await self._writes.before(run, at)
        self._read[run] = max(newest, seen.pointer.seq), found
        return found


async def departure(writes: Writes, run: str, seen: Seen, attempt: str, epoch: int = 0) -> Pointer | None:
    """Return the version up to `seen` that names an attempt as published, or else the one that took it off the list.
    None when the attempt is listed, or never was since `epoch`, as far back as the store keeps versions.
    """
    at: Seen | None = seen
    after: Pointer | None = None
    while at is not None and at.pointer.epoch >= epoch:
        if at.pointer.published is not None and at.pointer.published.attempt == attempt:
            return at.pointer
        if any(entry.attempt == attempt for entry in at.pointer.open):
            return after
        after = at.pointer
        at = await writes.before(run, at)
    return None
