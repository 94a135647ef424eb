"""`pointer.json`: the one mutable object of a run. Every change is one compare-and-swap on it (invariants I6 to I8).

`seq` rises by one with every write, `epoch` with every grant; `nonce` is fresh for every logical write, so no two
bodies are ever equal and an ETag, which is a hash of the body on most stores, can never come back. `prev` names the
version this body replaced: the chain is the history of the run, and how a writer that lost its answer finds out what
happened.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cachefs.formats.manifest import FORMAT, Order, Pin

Kind = Literal["grant", "open", "end", "promote", "rollback", "retire"]
"""What a write did: gave the run to an owner, announced an attempt, took an abandoned one off the list, named a
generation, went back to an older one, or gave attempts to garbage collection.
"""


class Prev(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pointer version that a write replaced; `etag` exactly as the store returned it."""

    etag: str
    version_id: str
    seq: int


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The generation that the run's pointer names."""

    generation: str
    attempt: str
    order: Order
    manifest: Pin


class OpenAttempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An attempt that was announced and has not ended: how members learn of it, and why GC leaves it alone."""

    generation: str
    attempt: str


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run's control object. `published` is None until the first promotion; `at` is for human readers only.

    `open` are the attempts that may still be promoted, in the order they were announced. `retired` are attempts that
    GC may delete: none of them can be promoted any more.
    """

    run: str
    kind: Kind
    seq: int
    epoch: int
    owner: str
    nonce: str
    at: str
    published: Published | None = None
    prev: Prev | None = None
    rollback_of: str | None = None
    open: tuple[OpenAttempt, ...] = ()
    retired: tuple[str, ...] = ()
    format: Literal[1] = FORMAT
