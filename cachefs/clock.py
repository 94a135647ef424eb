"""The only place that asks for the time, for randomness or for the boot.

No decision about safety compares times of two machines (invariant I12): clocks only delay, order a list for a
reader, or fill a field that a person reads.
"""

from __future__ import annotations

import random
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path


def now() -> float:
    """Return wall-clock seconds since the epoch, for ages and records shown to people."""
    return time.time()


def monotonic() -> float:
    """Return monotonic seconds, for settle times, deadlines and rates."""
    return time.monotonic()


def timestamp() -> str:
    """Return the current time as RFC 3339 UTC with seconds, for objects in the bucket."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_id() -> str:
    """Return a new unique id: 32 lower-case hex digits (uuid4)."""
    return uuid.uuid4().hex


def boot_id() -> str:
    """Return the id of this boot of the machine (random(4), /proc/sys/kernel/random/boot_id): what was written under
    another one and not synced may be lost.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def jitter(seconds: float) -> float:
    """Return a random delay between half of `seconds` and `seconds`, so that many waiters spread out."""
    return seconds * (0.5 + random.random() / 2)
