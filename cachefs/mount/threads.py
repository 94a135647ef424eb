"""The threads of the mount. Each kind of slow call has a limit of its own, so that it waits behind none of another kind;
the journal and the pins use trio's own limit, and wait behind none of the mount's.
"""

from __future__ import annotations

import trio

REQUESTS = 1000
"""Requests served at a time: more than can wait in threads, so that others are still read from the kernel. Less than
PENDING in _passthrough.c.
"""


class Threads:
    """The limits of one mount."""

    def __init__(self) -> None:
        self.syncs = trio.CapacityLimiter(64)
        """fsync and O_SYNC writes: they wait for the disk, which serves many at once."""
        self.copies = trio.CapacityLimiter(4)
        """Copies of pinned files: a few use the disk's whole bandwidth."""
