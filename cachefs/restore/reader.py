"""Read a run's pointer, the chain of its versions, and the manifests they name.

A generation is found through the pointer only, never through a listing (invariant I4); every object named by another is
read by version id and checked against the size and SHA-256 named there (I3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from cachefs.errors import CorruptError, NotFoundError
from cachefs.formats.codec import decode
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Manifest, Pin
from cachefs.formats.pointer import Kind, Pointer, Prev, Published
from cachefs.store.base import StoreReads


class Seen(msgspec.Struct, frozen=True):
    """One version of a pointer as it was read; `etag` exactly as the store returned it."""

    pointer: Pointer
    etag: str
    version_id: str

    @property
    def prev(self) -> Prev:
        """Return how the pointer that replaces this version names it."""
        return Prev(etag=self.etag, version_id=self.version_id, seq=self.pointer.seq)


class Entry(msgspec.Struct, frozen=True):
    """A generation in a run's history, with the write that made the pointer name it. `retired` says that garbage
    collection has taken it since: what is left of it must not be used, and it never comes back.
    """

    published: Published
    kind: Kind
    seq: int
    epoch: int
    owner: str
    at: str
    retired: bool = False


def read_pointer(store: StoreReads, keys: Keys, run: str) -> Seen | None:
    """Return the current pointer of a run, or None when there is none (or a delete marker hides it).

    Raises CorruptError when it is not a pointer of that run, and the store's errors.
    """
    return _read(store, keys.pointer(run), run, None)


def read_version(store: StoreReads, keys: Keys, run: str, prev: Prev) -> Seen | None:
    """Return the pointer version that a later one replaced, or None when the store no longer has it.

    Raises CorruptError when it is another object than the one named.
    """
    seen = _read(store, keys.pointer(run), run, prev.version_id)
    if seen is not None and (seen.pointer.seq, seen.etag) != (prev.seq, prev.etag):
        raise CorruptError(f"{keys.pointer(run)} version {prev.version_id} is not the version its successor names")
    return seen


def _read(store: StoreReads, key: str, run: str, version_id: str | None) -> Seen | None:
    found = store.get(key, version_id)
    if found is None:
        return None
    info, body = found
    pointer = decode(body, Pointer, key)
    if pointer.run != run or (pointer.prev.seq if pointer.prev else 0) + 1 != pointer.seq:
        raise CorruptError(f"{key} is not a pointer of run {run!r}: it names run {pointer.run!r}, seq {pointer.seq}")
    return Seen(pointer, info.etag, info.version_id)


def versions(store: StoreReads, keys: Keys, run: str, newest: Seen | None = None) -> Iterator[Seen]:
    """Iterate over the pointer's versions, from the current one or from `newest` on, as far back as the store keeps
    them.
    """
    seen = newest or read_pointer(store, keys, run)
    while seen is not None:
        yield seen
        prev = seen.pointer.prev
        seen = read_version(store, keys, run, prev) if prev else None


def history(store: StoreReads, keys: Keys, run: str, limit: int | None = None) -> Iterator[Entry]:
    """Iterate over the generations the pointer has named, newest first, at most `limit`.

    Consecutive versions that name the same generation (a grant changes the owner only) are one entry: the oldest of
    them. Ends where the store no longer keeps older versions of the pointer.
    """
    yield from islice(entries(versions(store, keys, run)), limit)


def entries(chain: Iterable[Seen]) -> Iterator[Entry]:
    """Iterate over the generations that a pointer's versions have named, both newest first. Pure; see `history`."""
    last: Entry | None = None
    retired: set[str] = set()
    for seen in chain:
        pointer = seen.pointer
        if last is not None and pointer.published != last.published:
            yield last
            last = None
        retired.update(pointer.retired)
        if (named := pointer.published) is not None:
            gone = named.attempt in retired
            last = Entry(named, pointer.kind, pointer.seq, pointer.epoch, pointer.owner, pointer.at, gone)
    if last is not None:
        yield last


def find(store: StoreReads, keys: Keys, run: str, generation: str | None = None) -> Published:
    """Return what the run's pointer names, or the newest generation of that name in its history.

    Raises NotFoundError that says what exists.
    """
    return locate(store, keys, run, generation)[1]


def locate(
    store: StoreReads, keys: Keys, run: str, generation: str | None = None, attempt: str | None = None
) -> tuple[Seen, Published]:
    """Return the current pointer, and what `find` returns; `attempt` tells generations of one name apart.

    Garbage collection has not taken it as of that pointer. Raises NotFoundError that says what exists.
    """
    seen = read_pointer(store, keys, run)
    if seen is None:
        raise NotFoundError(f"no run {run!r} in the store", hint="cachefs ls shows the runs")
    if generation is None and attempt is None:
        if seen.pointer.published is None:
            raise NotFoundError(f"run {run!r} has no published generation yet")
        return seen, seen.pointer.published
    names: list[str] = []
    gone = ""
    for entry in entries(versions(store, keys, run, seen)):
        named = entry.published
        if generation in (None, named.generation) and attempt in (None, named.attempt):
            if not entry.retired:
                return seen, named
            gone = " any more: garbage collection has removed it"
        elif not entry.retired:
            names.append(named.generation)
    known = ", ".join(dict.fromkeys(names)) or "none"
    wanted = f"{generation!r}" if attempt is None else f"{generation or ''!r} of attempt {attempt}"
    raise NotFoundError(f"run {run!r} has no published generation {wanted}{gone}", hint=f"published: {known}")


def read_pinned(store: StoreReads, pin: Pin) -> bytes:
    """Return the bytes of a small pinned object. Raises CorruptError when the version is gone or not what was
    promised.
    """
    found = store.get(pin.key, pin.version_id)
    if found is None:
        raise CorruptError(f"{pin.key} version {pin.version_id} is gone")
    body = found[1]
    if len(body) != pin.size or hashlib.sha256(body).hexdigest() != pin.sha256:
        raise CorruptError(f"{pin.key} version {pin.version_id} does not have the bytes that were pinned")
    return body


def load_manifest(store: StoreReads, run: str, published: Published) -> Manifest:
    """Return the manifest that a pointer names, after checking its bytes and that both speak of the same save.

    Raises CorruptError otherwise, and the store's errors.
    """
    pin = published.manifest
    manifest = decode(read_pinned(store, pin), Manifest, pin.key)
    named = (run, published.generation, published.attempt, published.order)
    if (manifest.run, manifest.generation, manifest.attempt, manifest.order) != named:
        raise CorruptError(f"{pin.key} is the manifest of another save than {run}/{published.generation}")
    return manifest
