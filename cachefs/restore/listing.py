"""Which runs a store holds, without a mount. Listing finds runs; what a run has published, only its pointer says."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from cachefs.errors import CorruptError
from cachefs.formats.keys import Keys
from cachefs.restore.reader import Seen, read_pointer
from cachefs.store.base import StoreReads


class Run(msgspec.Struct, frozen=True):
    """One run and its pointer. `error` says why the pointer could not be used; other runs are not affected."""

    name: str
    seen: Seen | None
    error: str = ""


def runs(store: StoreReads, keys: Keys) -> Iterator[Run]:
    """Iterate over the runs of a store in key order. Costs one listing per directory of runs and one read per run.

    Raises the store's errors; a listing is complete or an error.
    """
    for name in names(store, keys):
        yield _run(store, keys, name)


def names(
    store: StoreReads, keys: Keys, *, wanted: bool = False, known: Collection[str] = frozenset()
) -> Iterator[str]:
    """Iterate over the names of the runs of a store in key order, with `wanted` also of those that a member wants to
    have opened. Costs one listing per directory of runs and one per run; those in `known`, and runs inside them, are
    left out and cost nothing.
    """
    waiting = [keys.runs()]
    while waiting:
        prefix = waiting.pop()
        listing = store.list(prefix, delimiter="/")
        if f"{prefix}pointer.json" in listing.keys or (wanted and f"{prefix}wanted/" in listing.prefixes):
            yield keys.run_of(prefix)
        # These names belong to us, never to a run (formats/keys.py).
        ours = {f"{prefix}{name}/" for name in ("attempts", "leases", "loose", "wanted")}
        below = [one for one in listing.prefixes if one not in ours and keys.run_of(one) not in known]
        waiting.extend(sorted(below, reverse=True))


def _run(store: StoreReads, keys: Keys, name: str) -> Run:
    try:
        return Run(name, read_pointer(store, keys, name))
    except CorruptError as error:
        return Run(name, None, str(error))
