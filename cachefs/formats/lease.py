"""`leases/<id>.json`: a reader's announcement that it reads a generation, for which garbage collection must wait."""

from __future__ import annotations

from typing import Literal

import msgspec

from cachefs.formats.manifest import FORMAT


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease on one attempt, create-only. How old it is, the store says; `holder` and `created_at` are for people.

    A lease without an `attempt` protects nothing: garbage collection creates one to learn the store's time.
    """

    run: str
    generation: str
    attempt: str
    holder: str
    created_at: str
    format: Literal[1] = FORMAT
