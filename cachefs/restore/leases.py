"""Leases: a reader says what it reads, and garbage collection waits for it.

The order makes it safe. The reader creates its lease and *then* looks at the pointer; garbage collection retires an
attempt in the pointer and *then* lists the leases. So either the reader sees that the attempt is retired, or garbage
collection sees the lease (races 30 and 31). A reader that dies leaves a lease that expires: its age is the difference
of two times that the store has set, so no clocks of two machines are compared (I12).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import trio

from cachefs import clock
from cachefs.errors import CachefsError, DeniedError, NotFoundError, ProbeError, UnavailableError, Unsupported
from cachefs.formats.codec import decode, encode
from cachefs.formats.keys import Keys
from cachefs.formats.lease import Lease
from cachefs.formats.manifest import Pin
from cachefs.formats.pointer import Published
from cachefs.restore.reader import Seen, locate
from cachefs.store import createonly
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Hop, Inline

LEASE_LIFE = 6 * 3600.0
"""Seconds, by the store's clock, after which a lease that was not renewed protects nothing."""
TRIES = 5
"""Attempts to create a lease in a store that does not answer; the command that wants one is not more patient."""

Warn = Callable[[str], None]


class Held(msgspec.Struct, frozen=True):
    """What may be read: `published` was not retired when the pointer was `seen`, and since then the lease holds it.

    `lease` is the lease object's pin, None when there is no lease.
    """

    seen: Seen
    published: Published
    lease: Pin | None = None


class Standing(msgspec.Struct, frozen=True):
    """A lease as it is listed; `modified` is the store's time of its creation, seconds since the epoch."""

    key: str
    version_id: str
    modified: float
    size: int

    def live(self, now: float, life: float = LEASE_LIFE) -> bool:
        """Return whether the lease protects what it names at `now`, a time that the same store has set."""
        return now - self.modified < life


async def create(store: ObjectStore, keys: Keys, hop: Hop, lease: Lease, ident: str) -> Pin:
    """Create a lease object and return its pin; it was proved by reading back where the answer was unclear.

    Raises DeniedError and the other errors of the store, UnavailableError after TRIES.
    """
    key, body = keys.lease(lease.run, ident), encode(lease)
    digest = hashlib.sha256(body)
    for left in reversed(range(TRIES)):
        try:
            info = await createonly.create_only(store, hop, key, body, write_id=ident, sha256=digest.digest())
        except UnavailableError:
            if not left:
                raise
            await trio.sleep(clock.jitter(2.0 ** (TRIES - 1 - left)))
        else:
            return Pin(key=key, version_id=info.version_id, size=info.size, sha256=digest.hexdigest())
    raise AssertionError("unreachable")


async def take(
    store: ObjectStore,
    keys: Keys,
    hop: Hop,
    run: str,
    generation: str | None = None,
    attempt: str | None = None,
    *,
    holder: str = "",
    new_id: Callable[[], str] = clock.new_id,
    at: Callable[[], str] = clock.timestamp,
) -> Held:
    """Find a generation (default: what is published), lease it, and see that it is still there.

    What was published may be retired between the two looks; then what is published now is taken. Raises NotFoundError,
    for a named generation also when it has just been retired, and what `create` raises.
    """
    while True:
        _, found = await hop(locate, store, keys, run, generation, attempt)
        lease = Lease(run=run, generation=found.generation, attempt=found.attempt, holder=holder, created_at=at())
        pin = await create(store, keys, hop, lease, new_id())
        try:
            seen, again = await hop(locate, store, keys, run, found.generation, found.attempt)
        except NotFoundError:
            await hop(store.delete_version, pin.key, pin.version_id)
            if generation is not None or attempt is not None:
                raise
        else:
            return Held(seen, again, pin)


def standing(store: ObjectStore, keys: Keys, run: str) -> list[Standing]:
    """Return the leases of a run that are listed, live or not."""
    return [
        Standing(entry.key, entry.version_id, entry.modified, entry.size)
        for entry in store.list_versions(keys.lease(run))
        if not entry.is_marker
    ]


def read(store: ObjectStore, lease: Standing) -> Lease | None:
    """Return what a lease says, None when its holder has ended meanwhile. Raises CorruptError for other bytes."""
    found = store.get(lease.key, lease.version_id)
    return decode(found[1], Lease, lease.key) if found else None


@contextmanager
def leased(
    store: ObjectStore,
    keys: Keys,
    run: str,
    generation: str | None = None,
    attempt: str | None = None,
    *,
    holder: str,
    warn: Warn,
    lease: bool = True,
    life: float = LEASE_LIFE,
) -> Iterator[Held]:
    """Find a generation and hold a lease on it until the end of the block; blocks, and renews from a thread.

    Where nothing may or can be created there is no lease: `warn` is told, and the block runs. With `lease` False it is
    not tried. Raises what `take` raises.
    """
    held = None
    if lease:
        try:
            held = trio.run(_take, store, keys, run, generation, attempt, holder)
        except (DeniedError, Unsupported, ProbeError) as error:
            warn(f"no lease: garbage collection may remove what is read here: {error}")
    if held is None or held.lease is None:
        seen, published = locate(store, keys, run, generation, attempt)
        yield Held(seen, published)
        return
    renewal = _Renewal(store, keys, run, held, holder=holder, warn=warn, life=life)
    renewal.start()
    try:
        yield held
    finally:
        renewal.end()


async def _take(
    store: ObjectStore, keys: Keys, run: str, generation: str | None, attempt: str | None, holder: str
) -> Held:
    return await take(store, keys, Inline(), run, generation, attempt, holder=holder)


class _Renewal(threading.Thread):
    """Creates the next lease before half the life of the last one is over, then deletes the last one."""

    def __init__(
        self, store: ObjectStore, keys: Keys, run: str, held: Held, *, holder: str, warn: Warn, life: float
    ) -> None:
        super().__init__(name="lease", daemon=True)
        assert held.lease is not None
        self._store, self._keys = store, keys
        self._named = Lease(
            run=run, generation=held.published.generation, attempt=held.published.attempt, holder=holder, created_at=""
        )
        self._pin = held.lease
        self._warn = warn
        self._life = life
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(clock.jitter(self._life / 2)):
            try:
                lease = msgspec.structs.replace(self._named, created_at=clock.timestamp())
                old, self._pin = self._pin, trio.run(create, self._store, self._keys, Inline(), lease, clock.new_id())
                self._drop(old)
            except CachefsError as error:
                self._warn(f"the lease was not renewed: {error}")

    def end(self) -> None:
        """Stop, and delete the lease."""
        self._over.set()
        self.join()
        self._drop(self._pin)

    def _drop(self, pin: Pin) -> None:
        try:
            self._store.delete_version(pin.key, pin.version_id)
        except CachefsError as error:  # it protects what nobody reads any more, until it expires
            self._warn(f"the lease {pin.key} stays until it expires: {error}")
