"""Journal records (MessagePack). The databases and their keys are described in journal.py.

Times are wall-clock seconds since the epoch, sizes bytes, paths text forms (names.py).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from cachefs.formats.manifest import Close, Directory, Pin, Symlink, Tracker


class State(StrEnum):
    """The states of a generation; each is a promise (README, "What each state promises")."""

    OPEN = "open"
    STAGED = "staged"
    FLUSHED = "flushed"
    SEALED = "sealed"
    TESTED = "tested"
    PUBLISHED = "published"
    ABANDONED = "abandoned"
    FENCED = "fenced"

    @property
    def rank(self) -> int:
        """Return the position on the way to `published`; side exits rank below `open`."""
        return _RANKS.get(self, -1)

    @property
    def final(self) -> bool:
        """Return whether nothing more will happen to the attempt by itself."""
        return self in (State.PUBLISHED, State.ABANDONED)


_RANKS = {
    state: rank
    for rank, state in enumerate((State.OPEN, State.STAGED, State.FLUSHED, State.SEALED, State.TESTED, State.PUBLISHED))
}


class Baseline(msgspec.Struct, frozen=True):
    """What stood under a marker's path when the attempt was opened; None for nothing. Tells an old marker from a
    new one.
    """

    ino: int
    mtime_ns: int
    size: int


class AttemptRecord(msgspec.Struct, frozen=True):
    """One attempt to publish one generation.

    `path` is the generation's path in the mount, `run` and `generation` its two halves. `closed_at` is set once every
    file of the save is pinned: from then on the set is fixed and rotation cannot touch it. `ordinal` orders attempts of
    a run within one epoch and is given when the open record is written (`opened_epoch` then names that epoch).
    `files` and `size` (bytes) are those of the closed set. `signal` says what closed it, `error` why it does not move
    on or was abandoned. `strength` is that of the signal.

    `shared` is the id under which another daemon opened the attempt, or ours for it: "" until this member has joined
    one, or has refused one with this save (then without `opened_epoch`), and always in what this daemon opens.
    `foreign` marks an attempt that this daemon owns and of which nothing is in its mount, `wish` the save of the member
    that asked for it, `again` and `resumed` as in its open record. `count` members must report, `members` are their
    names (empty: only the number is known), `complete` says that all have. `rewritten`: one of its files was written a
    second time before it was closed, so that its bytes may be those of a later save of the name. `cancelled`: the
    training has removed or renamed it before it was closed.

    `opened_as` is the path at which its directory had a temporary name while it was written, "" for none.
    `signals` are close signals, in words by preset, that came while it was open and that nothing takes back: what
    carried one, a tracker, may name the next save by now. `torn`: a file of it was removed after a signal came.

    `boot` is the boot of the machine in which it was opened ("": not known, and so another one): its files are known to
    be on the disk only in that boot, or once it is `staged`.
    """

    attempt: str
    path: str
    run: str
    generation: str
    kind: Literal["directory", "file"]
    preset: str
    step: int
    opened_at: float
    serial: int
    state: State = State.OPEN
    baselines: dict[str, Baseline | None] = {}
    signal: str = ""
    strength: str = ""
    closed_at: float | None = None
    staged_at: float | None = None
    published_at: float | None = None
    opened_epoch: int | None = None
    ordinal: int | None = None
    files: int = 0
    size: int = 0
    symlinks: tuple[Symlink, ...] = ()
    directories: tuple[Directory, ...] = ()
    trackers: tuple[Tracker, ...] = ()
    report: Pin | None = None
    manifest: Pin | None = None
    sealed_epoch: int | None = None
    error: str = ""
    retries: int = 0
    shared: str = ""
    foreign: bool = False
    wish: str = ""
    again: bool = False
    resumed: bool = False
    members: tuple[str, ...] = ()
    count: int = 1
    complete: bool = False
    rewritten: bool = False
    cancelled: bool = False
    boot: str = ""
    opened_as: str = ""
    signals: dict[str, str] = {}
    torn: bool = False

    @property
    def key(self) -> str:
        """Return the attempt's id in the bucket."""
        return self.shared or self.attempt

    @property
    def waits(self) -> bool:
        """Return whether it has found no attempt in the bucket yet, and may."""
        return self.opened_epoch is None and not self.state.final


class SharedRecord(msgspec.Struct, frozen=True):
    """What this member knows of an attempt that another daemon opened, from `open.json` and its looks at the bucket.

    `seq` is that of a pointer that lists it: an older pointer, read from a lagging replica, says nothing about it.
    `waiting` are this member's saves of the name that had no attempt when it learned of this one. `local` is this
    member's own attempt that belongs to it, "" for none. `late`: it was opened before there was a daemon on this disk
    that looked at the run; `before`: before anything could be written in this mount. `close` is its close record,
    `report` what this member has answered, `refused` why it cannot take part, `tested` the epoch of the manifest of
    which it has tested its share.
    """

    attempt: str
    run: str
    generation: str
    kind: Literal["directory", "file"]
    step: int
    epoch: int
    ordinal: int
    members: tuple[str, ...]
    count: int
    seq: int
    wish: str = ""
    again: bool = False
    resumed: bool = False
    late: bool = False
    before: bool = False
    waiting: tuple[str, ...] = ()
    local: str = ""
    close: Close | None = None
    report: Pin | None = None
    refused: str = ""
    tested: int = 0


class Identity(msgspec.Struct, frozen=True):
    """What a pinned file was at its close. `xxh3` (xxh3_128, hex) is None until the bytes were read once."""

    ino: int
    size: int
    mtime_ns: int
    xxh3: str | None = None


class ShardRecord(msgspec.Struct, frozen=True):
    """One pinned file of an attempt on its way to the store.

    The pin is the hard link `pins/<attempt>/<shard>` in staging. `early` marks a file pinned before its generation
    closed: it is dropped when the file is opened for writing again. `digests` are the binary SHA-256 of the parts and
    are complete when `pin` is set: from then on the shard is flushed.
    """

    attempt: str
    shard: str
    paths: tuple[str, ...]
    identity: Identity
    mode: int
    key: str
    xattrs: dict[str, bytes] = {}
    early: bool = False
    part_size: int = 0
    upload_id: str = ""
    digests: tuple[bytes, ...] = ()
    pin: Pin | None = None
    error: str = ""
    retries: int = 0


class PartRecord(msgspec.Struct, frozen=True):
    """One part of a multipart upload that the store has acknowledged. `sha256` is binary."""

    number: int
    upload_id: str
    etag: str
    sha256: bytes


class RunRecord(msgspec.Struct, frozen=True):
    """What this daemon knows of a run: the epoch it holds (0: none), and the highest step and ordinal it has used.

    `incarnation` is the daemon that `epoch` was granted to, or that lost the run to `fenced_by`. `looked`: a
    daemon on this disk has looked at the run's open attempts. `seq` is that of the newest pointer it has seen. `ended`
    are names of which an attempt ended that is older than anything written in this mount, until this member has joined
    another.
    """

    run: str
    epoch: int = 0
    owner: str = ""
    ordinal: int = 0
    step: int = 0
    fenced_by: str = ""
    incarnation: str = ""
    looked: bool = False
    seq: int = 0
    ended: tuple[str, ...] = ()


class LooseRecord(msgspec.Struct, frozen=True):
    """A loose file as it was last mirrored."""

    path: str
    identity: Identity
    key: str
    version_id: str


class Meta(msgspec.Struct, frozen=True):
    """`format` of the journal, and a serial that numbers attempts in the order they were opened on this node. `serving`
    is the daemon (its incarnation) whose mount serves, or has served last.
    """

    format: int = 1
    serial: int = 0
    store: str = ""
    member: str = ""
    serving: str = ""
