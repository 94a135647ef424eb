"""The objects of one attempt: open, member report, close, manifest, test evidence. Canonical JSON, see codec.py.

Version rule: every object carries `format`; a reader refuses other numbers and unknown fields. So a field that older
readers of this format do not know is left out where it says nothing: they refuse only what they would misunderstand.
Digests: a shard is hashed in parts of `part_size` bytes (the last part may be shorter; an empty file has one empty
part). `parts` are the SHA-256 of each part, hex. `sha256` is the part's digest when there is one part, and otherwise
the SHA-256 over the concatenated binary part digests: exactly what S3 reports as ChecksumSHA256 of a single PutObject,
and of a multipart upload without its `-N` suffix (S3 user guide, "Checking object integrity").
Paths are text forms (names.py) relative to the generation; a generation that is a single file has the one path equal to
its own name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

FORMAT: Final = 1


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One immutable object version: what a reader must name and verify (invariant I3). `size` in bytes, `sha256`
    hex.
    """

    key: str
    version_id: str
    size: int
    sha256: str


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a generation and the object version that holds its bytes.

    `mode` are the permission bits, `mtime_ns` nanoseconds since the epoch. `paths` has more than one entry for hard
    links.
    """

    paths: tuple[str, ...]
    member: str
    pin: Pin
    part_size: int
    parts: tuple[str, ...]
    mode: int
    mtime_ns: int
    xattrs: dict[str, bytes] = {}


class Symlink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A symbolic link inside a generation; restored as it is, never followed."""

    path: str
    target: str


class Directory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A directory below the generation's root (`path` is "." for the root itself)."""

    path: str
    mode: int
    mtime_ns: int


class Tracker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small file beside the generation that names it (`latest`), with its bytes at close, or a link's target."""

    path: str
    content: bytes
    symlink: bool = False


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`open.json`: the owner announces an attempt. `ordinal` counts the attempts that `epoch` opened in this run.

    `count` members must report; `members` are their names, empty when only the number is known. `wish` is the save of a
    member that asked for the attempt. `again`: the member that asked, or else the owner, has had a save of this name
    just before that found no attempt; such a save is not part of this one on any member. `resumed`: it has had one
    whose attempt ended while it was written, and has gone on with that or begun the next; left out if not.
    """

    run: str
    generation: str
    attempt: str
    step: int
    epoch: int
    ordinal: int
    owner: str
    members: tuple[str, ...]
    count: int
    kind: Literal["directory", "file"]
    opened_at: str
    wish: str = ""
    again: bool = False
    resumed: bool | msgspec.UnsetType = msgspec.UNSET
    format: Literal[1] = FORMAT

    def __post_init__(self) -> None:
        _leave_out_resumed(self)


class Close(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`close.json`: a member saw the close signal; `preset` is the one that knew it, and decides the format checks.

    `strength` is that of the signal (A to D, see generations/presets.py): after a weak one the other members wait until
    their own files are quiet. `rewritten`: the member had written a file a second time before.
    """

    run: str
    generation: str
    attempt: str
    member: str
    preset: str
    signal: str
    strength: str
    closed_at: str
    rewritten: bool = False
    format: Literal[1] = FORMAT


class MemberReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`members/<member>.json`: everything one member holds of the generation, all of it flushed. With `error` the
    member cannot take part, and the attempt is abandoned. `save` is the member's own id of its part, "" for none.
    """

    run: str
    generation: str
    attempt: str
    member: str
    host: str
    writer: str
    shards: tuple[Shard, ...]
    symlinks: tuple[Symlink, ...] = ()
    directories: tuple[Directory, ...] = ()
    trackers: tuple[Tracker, ...] = ()
    save: str = ""
    error: str = ""
    format: Literal[1] = FORMAT

    def content(self) -> tuple[object, ...]:
        """Return what must be equal for two reports of one member to be the same report (I16)."""
        return (
            self.run,
            self.generation,
            self.attempt,
            self.member,
            self.shards,
            self.symlinks,
            self.directories,
            self.trackers,
            self.save,
            self.error,
        )


class ReportPin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which member report a manifest was sealed from."""

    member: str
    pin: Pin


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """The order of promotion inside a run: by step, then by the epoch that opened the attempt, then by ordinal."""

    step: int
    epoch: int
    ordinal: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`manifest.json`: the exact set of one save. `epoch` and `owner` are those of the sealing process."""

    run: str
    generation: str
    attempt: str
    kind: Literal["directory", "file"]
    order: Order
    epoch: int
    owner: str
    preset: str
    members: tuple[ReportPin, ...]
    shards: tuple[Shard, ...]
    symlinks: tuple[Symlink, ...]
    directories: tuple[Directory, ...]
    trackers: tuple[Tracker, ...]
    sealed_at: str
    format: Literal[1] = FORMAT

    @property
    def size(self) -> int:
        """Return the bytes of all shards."""
        return sum(shard.pin.size for shard in self.shards)


class MemberTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tests/<epoch>/<member>.json`: one member's share of the restore test; `error` names what was wrong, or ""."""

    run: str
    generation: str
    attempt: str
    manifest: Pin
    member: str
    level: Literal["checksum", "bytes"]
    shards: int
    bytes: int
    error: str
    tested_at: str
    format: Literal[1] = FORMAT


class Loaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user's command that loaded a restored copy: its exit status, the end of its output, how long it ran."""

    command: tuple[str, ...]
    user: str
    status: int
    output: str
    seconds: float


class Abandoned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`abandoned.json`: why an attempt will never be published. The pointer decides; this tells the members why."""

    run: str
    generation: str
    attempt: str
    epoch: int
    owner: str
    reason: str
    ended_at: str
    format: Literal[1] = FORMAT


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`wanted/<attempt>.json`: a member has a save for which the owner has opened no attempt. `attempt` is the
    member's own id of it, `serial` the order of its saves, `again` and `resumed` as in the open record.
    """

    run: str
    generation: str
    attempt: str
    member: str
    kind: Literal["directory", "file"]
    step: int
    serial: int = 0
    again: bool = False
    resumed: bool | msgspec.UnsetType = msgspec.UNSET
    format: Literal[1] = FORMAT

    def __post_init__(self) -> None:
        _leave_out_resumed(self)


class TestEvidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`test.json`: what the restore test read, and that it passed. A failed test writes nothing here.

    `tested_by` is the owner; `testers` are the members that read each other's shards.
    """

    run: str
    generation: str
    attempt: str
    manifest: Pin
    level: Literal["checksum", "bytes", "load"]
    tested_by: str
    epoch: int
    shards: int
    bytes: int
    checks: tuple[str, ...]
    tested_at: str
    testers: tuple[str, ...] = ()
    loaded: Loaded | None = None
    format: Literal[1] = FORMAT


def _leave_out_resumed(made: Open | Wanted) -> None:
    """Make False, which may be in the bucket, equal to what is left out."""
    if made.resumed is False:
        msgspec.structs.force_setattr(made, "resumed", msgspec.UNSET)


def tree_digest(parts: Sequence[bytes]) -> str:
    """Return the hex digest of a shard from its binary part digests (see the module's head). `parts` is not empty."""
    if len(parts) == 1:
        return parts[0].hex()
    return hashlib.sha256(b"".join(parts)).hexdigest()
