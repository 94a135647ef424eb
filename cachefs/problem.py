"""What the status shows of a run that does not move."""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """What keeps a run from moving; `run` is "" for the search for runs."""

    run: str
    error: str
