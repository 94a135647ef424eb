"""How often members look at the bucket. Pure.

All members of a run together make at most RATE reads per second for one kind of look, however many they are: with few
members a look comes every `least` seconds, with 512 every 10 s on average. S3 takes 5,500 reads per second and prefix
(user guide, "Best practices design patterns: optimizing Amazon S3 performance"), so what is saved here is money; a
listing costs as much as a write, a dozen reads, and is made at a tenth of the rate.
"""

from __future__ import annotations

RATE = 50.0
"""Looks per second of all members of a run together, at most."""
BUSY = 1.0
"""Least seconds between two looks at a run with something open; fewer when `pointer_poll` is less."""
LISTS = 5.0
"""Listings of the runs per second of all members together, at most."""
JITTERED = 0.75
"""What clock.jitter makes of a wait, on average."""


def pace(members: int, least: float, rate: float = RATE) -> float:
    """Return the seconds between two looks of one member, before jitter."""
    return max(least, members / (rate * JITTERED))


def busy(members: int, poll: float) -> float:
    """Return the seconds between two looks of one member at a run with something open, before jitter."""
    return pace(members, min(BUSY, poll))
