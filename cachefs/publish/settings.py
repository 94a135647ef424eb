"""How this daemon publishes, and whose reports its attempts need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from cachefs.formats.records import AttemptRecord
from cachefs.members import Members
from cachefs.publish.loading import Load

Confirm = Callable[[Exception], Awaitable[None]]
"""Returns when an error is no sign that the store is another one than has passed the probe; else it is cancelled."""


async def sure(error: Exception) -> None:
    """Confirm every error."""


class Settings(msgspec.Struct, frozen=True):
    """How this daemon publishes. `level` of the restore test; `tick` in seconds; `ranges`: whether the store honours
    ranges of a version (the probe says so); `publish` False: open and flush only.

    `incarnation` is this start of the daemon ("": it does not say when its mount began to serve).
    `count` members must report, `names` are theirs where they are known; the `owner` opens, seals and promotes;
    a `service` is an owner that has no part in any save, and never reports.
    Seconds: `poll` between two looks at what other members do, while nothing is open; `absent_after` is how long a
    member without files of a closed save waits before it says so; `deadline` is the longest wait for the members'
    reports.
    """

    member: str
    host: str = ""
    writer: str = ""
    incarnation: str = ""
    names: tuple[str, ...] = ()
    count: int = 1
    owner: bool = True
    service: bool = False
    poll: float = 15.0
    absent_after: float = 10.0
    deadline: float = 3600.0
    level: Literal["checksum", "bytes"] = "bytes"
    workers: int = 4
    tick: float = 5.0
    ranges: bool = True
    publish: bool = True
    load: Load | None = None
    """For the level `load`, which is `bytes` and then this."""

    @property
    def membership(self) -> Members:
        """Return who takes part."""
        return Members(self.member, self.names, self.count, self.owner, self.service)

    @property
    def bytes_level(self) -> Literal["checksum", "bytes"]:
        """Return how shards are read back."""
        return "checksum" if self.level == "checksum" else "bytes"


def expected(attempt: AttemptRecord, settings: Settings) -> tuple[tuple[str, ...], int]:
    """Return the names (if they are known) and the number of the members whose reports an attempt needs.

    A generation that is a single file is one member's.
    """
    if attempt.foreign:
        return attempt.members, attempt.count
    if attempt.kind == "file" or settings.count == 1:
        return (settings.names or (settings.member,))[:1] if settings.count == 1 else (settings.member,), 1
    return settings.names, settings.count
