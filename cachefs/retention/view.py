"""One complete look at a run: its pointer and all versions before it, the manifests they name, and what is stored.

A look is whole or it is an error: from a listing with a hole, or without one of the manifests, everything would look
like garbage. So whatever cannot be read, and whatever was written by a newer version, ends the pass before it has
deleted anything (race 33).
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from cachefs.errors import CachefsError, CorruptError, NotFoundError
from cachefs.formats.codec import decode
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Manifest
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Entry, Seen, entries, load_manifest, read_version
from cachefs.retention.plan import Stored, Version, View, pins
from cachefs.store.base import ObjectStore

_AT_ONCE = 32
REMEMBERED = 100_000
"""Pointer versions and shards of manifests that are kept in memory from one pass to the next, at most."""
"""Versions of a pointer read in one hop: a version never changes, so they are as good as one read."""
_MANIFEST = re.compile(r"manifest(-\d+)?\.json")


class Remembered(msgspec.Struct):
    """What was read of one run and never changes: versions of its pointer by version id, manifests by key and id."""

    versions: dict[str, Seen] = {}
    manifests: dict[Version, Manifest] = {}

    @property
    def size(self) -> int:
        """Return about how many things are held: pointer versions, and shards of manifests."""
        return len(self.versions) + sum(len(manifest.shards) + 1 for manifest in self.manifests.values())


class Memory:
    """What looks need not read again, in a pass and from pass to pass: a run whose pointer moves all the time would be
    read from the beginning each time, and faster than that it moves.
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        """`most` is the size that `trim` leaves."""
        self._most = most
        self._runs: OrderedDict[str, Remembered] = OrderedDict()

    def of(self, run: str) -> Remembered:
        """Return what is remembered of a run."""
        found = self._runs.setdefault(run, Remembered())
        self._runs.move_to_end(run)
        return found

    def trim(self) -> None:
        """Forget the runs that were not looked at for longest until what is left is small enough; manifests first."""
        for forget in ("manifests", "versions"):
            for known in self._runs.values():
                if sum(one.size for one in self._runs.values()) <= self._most:
                    return
                getattr(known, forget).clear()


async def look(writes: Writes, run: str, *, leased: frozenset[str], now: float, memory: Memory | None = None) -> View:
    """Look at a run. `leased` are the attempts with a live lease, `now` the store's time; what is in `memory` is not
    read again.

    Raises NotFoundError when there never was such a run, CorruptError when its pointer is gone, and otherwise the error
    that kept it from reading something, with the name of that.
    """
    while True:
        seen = await known(writes, run)
        try:
            return await _look(writes, run, seen, (memory or Memory()).of(run), leased=leased, now=now)
        except CorruptError:
            # Another pass may have retired and deleted it since the pointer was read.
            if (await known(writes, run)).etag == seen.etag:
                raise


async def _look(writes: Writes, run: str, seen: Seen, known: Remembered, *, leased: frozenset[str], now: float) -> View:
    store, keys = writes.store, writes.keys
    with needed(f"the history of run {run!r}"):
        chain = [one async for one in _chain(writes, run, seen, known.versions)]
    history = tuple(entries(chain))
    with needed(f"the list of attempts of run {run!r}"):
        stored, sealed = await writes.read(_stored, store, keys, run)
    manifests: dict[str, Manifest] = {}
    for entry in history:
        attempt = entry.published.attempt
        if not entry.retired and attempt not in manifests:
            pin = entry.published.manifest
            version = (pin.key, pin.version_id)
            if version not in known.manifests:
                with needed(f"the manifest of {entry.published.generation} (attempt {attempt})"):
                    known.manifests[version] = await writes.read(load_manifest, store, run, entry.published)
            manifests[attempt] = known.manifests[version]
    reused: set[Version] = set()
    for opened in seen.pointer.open:
        for key in sealed.get(opened.attempt, ()):
            with needed(key):
                reused.update(pins(await writes.read(_manifest, store, key)))
    return View(
        seen=seen,
        history=history,
        complete=chain[-1].pointer.prev is None,
        listed=_listed(chain, history),
        manifests=manifests,
        reused=frozenset(reused),
        stored=stored,
        leased=leased,
        now=now,
    )


async def known(writes: Writes, run: str) -> Seen:
    """Return the current pointer of a run. Raises as `look`."""
    with needed(f"the pointer of run {run!r}"):
        seen = await writes.pointer(run)
    if seen is None:
        await writes.check_never_existed(run)
        raise NotFoundError(f"no run {run!r} in the store", hint="cachefs ls shows the runs")
    return seen


@contextmanager
def needed(what: str) -> Iterator[None]:
    """Name what could not be read in the error of the block, which stays of its kind."""
    try:
        yield
    except CachefsError as error:
        named = copy.copy(error)
        named.args = (f"cannot read {what}: {error}",)
        raise named from error


async def _chain(writes: Writes, run: str, seen: Seen, known: dict[str, Seen]) -> AsyncIterator[Seen]:
    at: Seen | None = seen
    while at is not None:
        known[at.version_id] = at
        yield at
        if at.pointer.prev is not None and at.pointer.prev.version_id in known:
            at = known[at.pointer.prev.version_id]
            continue
        older = await writes.read(_older, writes.store, writes.keys, run, at, known)
        for one in older[:-1]:
            known[one.version_id] = one
            yield one
        at = older[-1] if older else None


def _older(store: ObjectStore, keys: Keys, run: str, seen: Seen, known: Mapping[str, Seen]) -> list[Seen]:
    """Return the versions before one, newest first, some at a time, and none before one that is known."""
    found: list[Seen] = []
    while seen.pointer.prev is not None and len(found) < _AT_ONCE and seen.pointer.prev.version_id not in known:
        prev = read_version(store, keys, run, seen.pointer.prev)
        if prev is None:
            break
        found.append(seen := prev)
    return found


def _listed(chain: list[Seen], history: tuple[Entry, ...]) -> frozenset[str]:
    opened = {entry.attempt for seen in chain for entry in seen.pointer.open}
    retired = {attempt for seen in chain for attempt in seen.pointer.retired}
    return frozenset(opened | retired | {entry.published.attempt for entry in history})


def _stored(store: ObjectStore, keys: Keys, run: str) -> tuple[dict[str, Stored], dict[str, list[str]]]:
    """Return what lies under each attempt, and the keys of its manifests."""
    prefix = keys.attempts(run)
    found: dict[str, Stored] = {}
    sealed: dict[str, list[str]] = {}
    for entry in store.list_versions(prefix):
        attempt, below, name = entry.key.removeprefix(prefix).partition("/")
        if not below:
            continue
        old = found.get(attempt, Stored(0, 0, 0.0, False))
        newest = max(old.newest, entry.modified)
        opened = old.opened or name == "open.json"
        found[attempt] = Stored(old.objects + 1, old.bytes + entry.size, newest, opened)
        if _MANIFEST.fullmatch(name) and entry.is_latest and not entry.is_marker:
            sealed.setdefault(attempt, []).append(entry.key)
    for upload in store.list_multiparts(prefix):
        attempt = upload.key.removeprefix(prefix).partition("/")[0]
        old = found.get(attempt, Stored(0, 0, 0.0, False))
        found[attempt] = Stored(old.objects, old.bytes, max(old.newest, upload.initiated), old.opened)
    return found, sealed


def _manifest(store: ObjectStore, key: str) -> Manifest:
    found = store.get(key)
    if found is None:
        raise CorruptError(f"{key} is gone")
    return decode(found[1], Manifest, key)
