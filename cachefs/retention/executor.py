"""One pass over a run. Nothing is deleted but by version id, and only what the pointer lists as retired.

    read pointer, history, manifests, listing, leases ─► plan ─► retire by swap ─► list leases ─► per retired attempt:
    list ─► pointer still lists it as retired? ─► delete ─► list: empty? ─► take off the pointer's list by swap

The swap carries the ETag of the pointer that the plan was made from. So a promotion, an announcement or a rollback
that came between makes it fail, and the plan is made again; afterwards nothing can promote or roll back to what was
retired (race 30). Leases are listed after it, as readers look at the pointer after they have created theirs (race 31).
A pass that dies leaves attempts in `retired`: the next one deletes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec
import trio

from cachefs import clock
from cachefs.errors import CachefsError, ConditionFailed, CorruptError, DeniedError
from cachefs.formats.lease import Lease
from cachefs.publish import rules
from cachefs.publish.rules import Cas
from cachefs.publish.writes import Writes, wait
from cachefs.restore import leases
from cachefs.restore.pool import run_all
from cachefs.restore.reader import Seen
from cachefs.retention.plan import Plan, Policy, Version, decide
from cachefs.retention.view import Memory, known, look, needed
from cachefs.store.base import UploadInfo, VersionInfo

BATCH = 100
"""Deletes between two reports of progress."""
RETIRED = 256
"""Attempts retired by one swap, so that the pointer stays small however much garbage there is; then they are deleted,
and the next ones follow.
"""
TRIES = 6
"""Retries of one request before a pass gives up; the next pass goes on where it stopped."""

Progress = Callable[[int, int], None]
"""Called with the number of objects just deleted and their bytes."""


class Collected(msgspec.Struct, frozen=True):
    """What one pass did: attempts retired by it, object versions deleted and their bytes, uploads aborted, attempts
    that it left because somebody reads them.
    """

    plan: Plan
    retired: tuple[str, ...]
    deleted: int
    freed: int
    aborted: int
    waiting: tuple[str, ...]


class _Clock(msgspec.Struct, frozen=True):
    """The store's time `now`, as `key` was created, and all leases that were listed with it."""

    now: float
    standing: Sequence[leases.Standing]
    key: str = ""


async def patience(error: CachefsError, retries: int) -> None:
    """Wait before a retry, longer each time; raise the error after TRIES. A pass may be given up at any point."""
    if retries >= TRIES:
        raise error
    await trio.sleep(wait(retries))


def _silent(objects: int, size: int) -> None:
    pass


class Collector:
    """Collects garbage through `writes`, whose `pause` decides how long it waits for a store that does not answer.

    `holder` names this program in the object by which it asks for the store's time; `workers` deletes run at once.
    """

    def __init__(
        self,
        writes: Writes,
        policy: Policy,
        *,
        holder: str = "gc",
        workers: int = 8,
        progress: Progress = _silent,
        new_id: Callable[[], str] = clock.new_id,
        at: Callable[[], str] = clock.timestamp,
    ) -> None:
        self._writes = writes
        self._policy = policy
        self._holder = holder
        self._workers = workers
        self._progress = progress
        self._new_id = new_id
        self._at = at
        self._memory = Memory()
        self._deleted = self._freed = self._aborted = 0

    async def preview(self, run: str) -> Plan:
        """Return what a pass would do now. Nothing is written, so ages are taken by this machine's clock.

        Raises what `collect` raises.
        """
        _, plan = await self._plan(run, _Clock(clock.now(), await self._standing(run)))
        return plan

    async def collect(self, run: str) -> Collected:
        """Make one pass over a run.

        Nothing was deleted when it raises because something could not be read: the store's errors, CorruptError for
        what is damaged, hidden or of a newer version, NotFoundError for a run that is not there. Nothing was retired
        either when it raises DeniedError because these credentials may not delete. A pass that ends with an error later
        has lost nothing either; the next one goes on.
        """
        self._deleted = self._freed = self._aborted = 0
        await known(self._writes, run)  # or the next line would write into a run that is not there
        told = await self._ask_the_time(run)
        try:
            done = await self._pass(run, told)
        except CachefsError:
            await self._drop(told)
            raise
        finally:
            self._memory.trim()
        await self._drop(told)
        return done

    async def _pass(self, run: str, told: _Clock) -> Collected:
        plan, retired, new = await self._retire(run, told)
        collected = list(new)
        waiting = await self._clear(run, told, retired, plan)
        while len(new) == RETIRED:
            rest, retired, new = await self._retire(run, told)
            collected += new
            waiting = await self._clear(run, told, retired, rest)
        await self._tidy(run, told)
        return Collected(plan, tuple(collected), self._deleted, self._freed, self._aborted, waiting)

    async def _clear(self, run: str, told: _Clock, retired: Sequence[str], plan: Plan) -> tuple[str, ...]:
        """Delete what is left of the retired attempts that nobody reads; return the others."""
        held = await self._leased(run, told.now, await self._standing(run))  # after the swap (I14)
        emptied = [
            attempt for attempt in retired if attempt not in held and await self._sweep(run, attempt, plan.named)
        ]
        await self._forget(run, emptied)
        return tuple(attempt for attempt in retired if attempt in held)

    # looking

    async def _ask_the_time(self, run: str) -> _Clock:
        """Learn the store's time from an object created just now; a lease that protects nothing."""
        writes = self._writes
        told = Lease(run=run, generation="", attempt="", holder=self._holder, created_at=self._at())
        pin = await leases.create(writes.store, writes.keys, writes.hop, told, self._new_id())
        standing = await self._standing(run)
        times = [one.modified for one in standing if one.key == pin.key]
        if not times:
            raise CorruptError(f"{pin.key} was created and is not listed", hint="the store's listings lag behind")
        return _Clock(times[0], standing, pin.key)

    async def _standing(self, run: str) -> list[leases.Standing]:
        with needed(f"the list of leases of run {run!r}"):
            return await self._writes.read(leases.standing, self._writes.store, self._writes.keys, run)

    async def _leased(self, run: str, now: float, standing: Sequence[leases.Standing]) -> frozenset[str]:
        """Return the attempts with a live lease."""
        found = set()
        for one in standing:
            if one.live(now):
                with needed(f"the lease {one.key}"):
                    lease = await self._writes.read(leases.read, self._writes.store, one)
                if lease is not None:
                    found.add(lease.attempt)
        return frozenset(found - {""})

    async def _plan(self, run: str, told: _Clock) -> tuple[Seen, Plan]:
        leased = await self._leased(run, told.now, told.standing)
        view = await look(self._writes, run, leased=leased, now=told.now, memory=self._memory)
        return view.seen, decide(view, self._policy)

    # acting

    async def _retire(self, run: str, told: _Clock) -> tuple[Plan, tuple[str, ...], tuple[str, ...]]:
        """Retire what the plan says, at most RETIRED attempts; return the plan, all attempts that are retired now, and
        the new ones among them.
        """
        retries = 0
        while True:
            seen, plan = await self._plan(run, told)
            new = tuple(one.attempt for one in plan.retire)[:RETIRED]
            if new:
                await self._check_right(run, told)
            ours = rules.retire(seen, new, nonce=self._new_id(), at=self._at())
            if ours is None:
                return plan, seen.pointer.retired, ()
            if (await self._writes.swap(run, ours)).outcome is not Cas.LOST:
                return plan, ours.retired, new
            await self._writes.pause(ConditionFailed(f"the pointer of run {run!r} moved under the plan"), retries)
            retries += 1

    async def _check_right(self, run: str, told: _Clock) -> None:
        """Delete what does not exist, with the id of a version that does. Raises DeniedError when that is refused: what
        was retired by somebody who may not delete would stay as it is, and nobody could use it.
        """
        key = self._writes.keys.open(run, self._new_id())
        version = next(one.version_id for one in told.standing if one.key == told.key)
        try:
            await self._writes.read(self._writes.store.delete_version, key, version)
        except DeniedError as error:
            raise DeniedError(
                f"may not delete versions below {self._writes.keys.attempts(run)}, so nothing was retired: {error}",
                hint="a daemon with gc = true needs the bucket policy and the role of cachefs policy --owner-collects",
            ) from error

    async def _sweep(self, run: str, attempt: str, named: Collection[Version]) -> bool:
        """Delete what is left of a retired attempt, but for what a manifest that stays names; return whether nothing
        is left.
        """
        versions, uploads = await self._rest(run, attempt)
        garbage = [entry for entry in versions if (entry.key, entry.version_id) not in named]
        if garbage or uploads:
            # After the listing: what was listed was garbage then, whatever another pass has finished since.
            seen = await self._writes.standing_pointer(run)
            if attempt not in seen.pointer.retired:
                return False
            await self._delete(garbage)
            for upload in uploads:
                await self._writes.read(self._writes.store.abort_multipart, upload.key, upload.upload_id)
                self._aborted += 1
            versions, uploads = await self._rest(run, attempt)
        return not versions and not uploads

    async def _rest(self, run: str, attempt: str) -> tuple[list[VersionInfo], list[UploadInfo]]:
        """Return what is stored of an attempt: versions, delete markers, uploads."""
        writes, prefix = self._writes, f"{self._writes.keys.attempt(run, attempt)}/"

        def rest() -> tuple[list[VersionInfo], list[UploadInfo]]:
            return list(writes.store.list_versions(prefix)), writes.store.list_multiparts(prefix)

        with needed(f"the list of {prefix}"):
            return await writes.read(rest)

    async def _delete(self, garbage: Sequence[VersionInfo]) -> None:
        """Delete versions for good. A delete whose answer was lost is sent again: gone is gone."""
        for start in range(0, len(garbage), BATCH):
            batch = garbage[start : start + BATCH]
            await self._writes.read(self._delete_versions, batch)
            size = sum(entry.size for entry in batch)
            self._deleted += len(batch)
            self._freed += size
            self._progress(len(batch), size)

    def _delete_versions(self, batch: Sequence[VersionInfo]) -> None:
        delete = self._writes.store.delete_version
        run_all([partial(delete, entry.key, entry.version_id) for entry in batch], self._workers)

    async def _forget(self, run: str, emptied: Sequence[str]) -> None:
        """Take attempts of which nothing is left off the pointer's list."""
        while emptied:
            seen = await self._writes.standing_pointer(run)
            ours = rules.retire(seen, (), swept=emptied, nonce=self._new_id(), at=self._at())
            if ours is None or (await self._writes.swap(run, ours)).outcome is not Cas.LOST:
                return

    async def _drop(self, told: _Clock) -> None:
        """Delete the object that told us the time; if that fails, a pass after the life of a lease does."""
        writes = self._writes
        for one in told.standing:
            if one.key == told.key:
                try:
                    await writes.hop(writes.store.delete_version, one.key, one.version_id)
                except CachefsError:
                    return

    async def _tidy(self, run: str, told: _Clock) -> None:
        """Delete expired leases, and wishes that nobody has granted in the time of `grace`."""
        writes, keys = self._writes, self._writes.keys

        def old() -> list[tuple[str, str]]:
            wishes = [
                (entry.key, entry.version_id)
                for entry in writes.store.list_versions(keys.wanted(run))
                if told.now - entry.modified >= self._policy.grace
            ]
            expired = [one for one in told.standing if not one.live(told.now)]
            return wishes + [(one.key, one.version_id) for one in expired]

        for key, version_id in await writes.read(old):
            await writes.read(writes.store.delete_version, key, version_id)
