"""Conditional writes, and what becomes of the unclear ones. Nothing else in cachefs.publish writes to the store.

One create-only request is resolved by store/createonly.py; here it is repeated until the outcome is clear.

A write whose answer is a 412, 409, 5xx, reset or timeout is *unknown* until it is read back (invariant I10): the answer
may belong to a second copy of a request whose first copy won. So each write is a loop of send and read-back that ends
only with proof, however long that takes: giving up on a time limit would leave a write behind that nobody has read.
A retry is always the identical request (I11); at most one copy of it can succeed. A cancelled loop is what a crash is:
the next process reads the state from the bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import trio

from cachefs import clock
from cachefs.errors import (
    CachefsError,
    ConditionConflict,
    ConditionFailed,
    CorruptError,
    ProbeError,
    StoreError,
    UnavailableError,
)
from cachefs.formats.codec import decode, encode
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Pin
from cachefs.formats.pointer import Pointer
from cachefs.publish import rules
from cachefs.publish.rules import Cas
from cachefs.restore.reader import Seen, read_pointer, read_version
from cachefs.store import createonly
from cachefs.store.base import CREATE_ONLY, Condition, ObjectInfo, ObjectStore
from cachefs.store.hop import Hop

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
Pause = Callable[[CachefsError, int], Awaitable[None]]
"""Waits before a retry: what went wrong, and how many retries there were. The place to show both to the operator."""

UNCLEAR = (ConditionFailed, ConditionConflict, UnavailableError)

WAIT_FIRST = 1.0
"""Seconds before the first retry; Cloudflare R2 takes one write per second to one key (its documented limit)."""
WAIT_MAX = 30.0
"""Longest wait between two retries, seconds."""


class Conflict(CorruptError):
    """Other bytes stand under a key that only this write may have created; it can never succeed."""


class Swap(msgspec.Struct, frozen=True):
    """The outcome of a compare-and-swap: LANDED, SUPERSEDED or LOST, with the current pointer as read back."""

    outcome: Cas
    current: Seen


def wait(retries: int) -> float:
    """Return the seconds to wait before retry number `retries` (from 0)."""
    return clock.jitter(min(WAIT_FIRST * 2.0 ** min(retries, 16), WAIT_MAX))


async def pause(error: CachefsError, retries: int) -> None:
    """Wait before a retry, longer each time."""
    await trio.sleep(wait(retries))


def write_id(key: str, sha256: str) -> str:
    """Return the id of a create-only write: the same after a restart, for the same bytes."""
    return hashlib.sha256(f"{key}\n{sha256}".encode()).hexdigest()[:32]


def pin_of(info: ObjectInfo, sha256: str) -> Pin:
    """Return the pin of a version. Raises ProbeError when the store gave it no version id (race 39)."""
    if info.version_id in ("", "null"):
        raise ProbeError(
            f"{info.key} was written without a version id: versioning of the bucket is suspended",
            hint="enable versioning; nothing is published until then",
        )
    return Pin(key=info.key, version_id=info.version_id, size=info.size, sha256=sha256)


class Writes:
    """Sends conditional writes to one store; `pause` waits between retries."""

    def __init__(self, store: ObjectStore, keys: Keys, hop: Hop, pause: Pause = pause) -> None:
        self.store = store
        self.keys = keys
        self.hop = hop
        self.pause = pause

    async def create_only(self, key: str, body: bytes) -> Pin:
        """Create an object in one request with If-None-Match and return the pin of the version that holds `body`.

        Raises Conflict when other bytes stand there, ProbeError when the store gave no version id, and every error that
        proves that nothing was written (DeniedError, BadPart, ...). Whatever is unclear is retried until it is clear.
        """
        digest = hashlib.sha256(body)
        ident = write_id(key, digest.hexdigest())
        retries = 0
        while True:
            try:
                info = await createonly.create_only(
                    self.store, self.hop, key, body, write_id=ident, sha256=digest.digest()
                )
            except UnavailableError as error:
                await self.pause(error, retries)
                retries += 1
            except CorruptError as error:
                raise Conflict(str(error), hint=error.hint) from error
            else:
                return pin_of(info, digest.hexdigest())

    async def create(self, key: str, value: S, same: Callable[[S, S], bool]) -> tuple[S, Pin]:
        """Create a small format object, or accept the one an earlier run of this step left: `same(theirs, ours)`.

        Returns the object that stands in the store, and its pin. Raises Conflict when it is not the same.
        """
        body = encode(value)
        try:
            return value, await self.create_only(key, body)
        except Conflict:
            found = await self.read(self.store.get, key)
            if found is None:
                raise
            info, theirs = found
            standing = decode(theirs, type(value), key)
            if not same(standing, value):
                raise
            return standing, pin_of(info, hashlib.sha256(theirs).hexdigest())

    async def assert_single(self, key: str) -> None:
        """Check that exactly one version of a create-only key exists.

        Raises ProbeError otherwise: the store has accepted a write whose condition was false, so it no longer is the
        store that passed the probe (race 40).
        """
        entries = await self.read(self._entries, key)
        if len(entries) != 1:
            raise ProbeError(
                f"{key} has {len(entries)} versions; it was written with If-None-Match, so there must be one",
                hint="the store ignores conditional writes, or another program wrote there: run cachefs doctor",
            )

    async def swap(self, run: str, ours: Pointer) -> Swap:
        """Replace the pointer version `ours.prev` (None: there is no pointer yet) by `ours` and read the result back.

        Returns only with proof: LANDED and SUPERSEDED mean that `ours` was current, LOST that it never was and never
        will be. Raises CorruptError when the pointer has been hidden or removed (the run is halted then), and every
        error that proves that the last copy of the request did nothing (DeniedError).
        """
        key, body = self.keys.pointer(run), encode(ours)
        condition = Condition(if_match=ours.prev.etag) if ours.prev else CREATE_ONLY
        sha256 = hashlib.sha256(body).digest()
        retries = 0
        while True:
            unclear: StoreError = UnavailableError(f"{key} reads older than it was written")
            try:
                await self.hop(self.store.put, key, body, condition=condition, sha256=sha256)
            except UNCLEAR as error:
                unclear = error
            # Whatever the answer was, the read-back decides (I17).
            outcome, current = await self._outcome(run, ours)
            if outcome is not Cas.UNDECIDED and current is not None:
                return Swap(outcome, current)
            if ours.prev is None:
                await self.check_never_existed(run)
            await self.pause(unclear, retries)
            retries += 1

    async def _outcome(self, run: str, ours: Pointer) -> tuple[Cas, Seen | None]:
        chain: list[Seen | None] = [await self.pointer(run)]
        while (outcome := rules.classify_cas(ours, chain)) is Cas.WALK:
            last = chain[-1]
            chain.append(await self.before(run, last) if last else None)
        if outcome is Cas.HIDDEN:
            raise rules.hidden(run)
        return outcome, chain[0]

    async def pointer(self, run: str) -> Seen | None:
        """Return the current pointer; waits for a store that does not answer."""
        return await self.read(read_pointer, self.store, self.keys, run)

    async def standing_pointer(self, run: str) -> Seen:
        """Return the current pointer of a run that has one. Raises CorruptError when it is gone: the run is halted."""
        seen = await self.pointer(run)
        if seen is None:
            raise rules.hidden(run)
        return seen

    async def before(self, run: str, seen: Seen) -> Seen | None:
        """Return the version that a pointer replaced; None for the first, and for one that the store no longer has."""
        prev = seen.pointer.prev
        return await self.read(read_version, self.store, self.keys, run, prev) if prev else None

    async def check_never_existed(self, run: str) -> None:
        """Check that no version of the run's pointer exists, not even behind a delete marker. Raises CorruptError.

        If-None-Match succeeds over a delete marker (S3 user guide, "Conditional write behavior"), so the condition
        alone would start a run a second time.
        """
        if await self.read(self._entries, self.keys.pointer(run)) and await self.pointer(run) is None:
            raise rules.hidden(run)

    async def read(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a read of the store; waits for a store that does not answer, raises its other errors."""
        retries = 0
        while True:
            try:
                return await self.hop(fn, *args, **kwargs)
            except UnavailableError as error:
                await self.pause(error, retries)
                retries += 1

    async def small(self, key: str, kind: type[S]) -> S | None:
        """Read a format object once; None when there is none. Raises CorruptError, and the store's errors."""
        found = await self.hop(self.store.get, key)
        return None if found is None else decode(found[1], kind, key)

    def _entries(self, key: str) -> list[str]:
        return [entry.version_id for entry in self.store.list_versions(key) if entry.key == key]
