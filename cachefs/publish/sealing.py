"""Build the small objects of an attempt from journal records and member reports. Pure.

Equal records give equal bytes: every time in them comes from the journal. The exceptions are `sealed_at` and
`tested_at`: a step that is repeated after a crash may differ from what it left in these. So each `same_*` says when an
object that already stands under the key is the same one; it is then taken as it stands, with its own pin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from cachefs.errors import CorruptError
from cachefs.formats.manifest import (
    Close,
    Directory,
    Loaded,
    Manifest,
    MemberReport,
    Open,
    Order,
    Pin,
    ReportPin,
    Shard,
    TestEvidence,
    tree_digest,
)
from cachefs.formats.records import AttemptRecord, ShardRecord
from cachefs.restore.layout import check_manifest
from cachefs.restore.shards import Source

OpenSource = Callable[[Shard], Source]
Completeness = Callable[[Manifest, OpenSource], Sequence[str]]
"""Checks the formats of a generation's files and returns the names of the checks that ran; raises CorruptError with the
file. Synchronous: runs in a worker thread.
"""


def no_checks(manifest: Manifest, open_source: OpenSource) -> Sequence[str]:
    """Check no formats."""
    return ()


def rfc3339(seconds: float) -> str:
    """Return wall-clock seconds since the epoch as in clock.timestamp()."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def opening(attempt: AttemptRecord, *, epoch: int, ordinal: int, owner: str, members: Sequence[str]) -> Open:
    """Return `open.json`: the set of members whose reports the manifest will need is fixed here (I16)."""
    return Open(
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.attempt,
        step=attempt.step,
        epoch=epoch,
        ordinal=ordinal,
        owner=owner,
        members=tuple(sorted(members)),
        count=len(members),
        kind=attempt.kind,
        opened_at=rfc3339(attempt.opened_at),
    )


def same_open(theirs: Open, ours: Open) -> bool:
    """An attempt id is never used twice, so an open record that stands was written by an earlier process of ours: its
    epoch, ordinal and owner hold.
    """
    names = ("run", "generation", "attempt", "step", "members", "kind")
    return theirs.epoch <= ours.epoch and all(getattr(theirs, name) == getattr(ours, name) for name in names)


def closing(attempt: AttemptRecord, member: str) -> Close:
    """Return `close.json`."""
    return Close(
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.attempt,
        member=member,
        preset=attempt.preset,
        signal=attempt.signal,
        closed_at=rfc3339(attempt.closed_at if attempt.closed_at is not None else attempt.opened_at),
    )


def same_close(theirs: Close, ours: Close) -> bool:
    """Whichever member saw the signal first has written it."""
    return (theirs.run, theirs.generation, theirs.attempt) == (ours.run, ours.generation, ours.attempt)


def report(
    attempt: AttemptRecord, shards: Iterable[ShardRecord], *, member: str, host: str, writer: str
) -> MemberReport:
    """Return the member's report of a flushed attempt.

    Raises CorruptError when a shard has no pin, or one that does not fit what was pinned in staging.
    """
    return MemberReport(
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.attempt,
        member=member,
        host=host,
        writer=writer,
        shards=tuple(sorted((_shard(record, member) for record in shards), key=lambda shard: shard.paths)),
        symlinks=tuple(sorted(attempt.symlinks, key=lambda link: link.path)),
        directories=tuple(sorted(attempt.directories, key=lambda entry: entry.path)),
        trackers=tuple(sorted(attempt.trackers, key=lambda tracker: tracker.path)),
    )


def same_report(theirs: MemberReport, ours: MemberReport) -> bool:
    """Return whether a report repeats another; host and writer may differ after a restart."""
    return theirs.content() == ours.content()


def _shard(record: ShardRecord, member: str) -> Shard:
    name = record.paths[0]
    if record.pin is None or not record.digests:
        raise CorruptError(f"shard {name} is not flushed")
    if record.pin.size != record.identity.size or record.pin.sha256 != tree_digest(record.digests):
        raise CorruptError(f"shard {name} was flushed with other bytes than were staged")
    return Shard(
        paths=tuple(sorted(record.paths)),
        member=member,
        pin=record.pin,
        part_size=record.part_size,
        parts=tuple(digest.hex() for digest in record.digests),
        mode=record.mode,
        mtime_ns=record.identity.mtime_ns,
        xattrs=record.xattrs,
    )


def manifest(
    opened: Open, closed: Close, reports: Sequence[tuple[MemberReport, Pin]], *, epoch: int, owner: str, sealed_at: str
) -> Manifest:
    """Return the manifest of an attempt from the reports of exactly the members that `open.json` declares.

    Raises CorruptError when the set is not exact, a report speaks of another save, or the paths of all members together
    are not one sound tree (restore/layout.py).
    """
    named = [member_report.member for member_report, _ in reports]
    if Counter(named) != Counter(opened.members):
        raise CorruptError(f"reports of members {sorted(named)}, expected exactly {sorted(opened.members)}")
    for member_report, pin in reports:
        save = (member_report.run, member_report.generation, member_report.attempt)
        if save != (opened.run, opened.generation, opened.attempt):
            raise CorruptError(f"{pin.key} is a report of another save than {opened.generation}")
        if any(shard.member != member_report.member for shard in member_report.shards):
            raise CorruptError(f"{pin.key} reports shards of another member")
    parts = [member_report for member_report, _ in reports]
    sealed = Manifest(
        run=opened.run,
        generation=opened.generation,
        attempt=opened.attempt,
        kind=opened.kind,
        order=Order(step=opened.step, epoch=opened.epoch, ordinal=opened.ordinal),
        epoch=epoch,
        owner=owner,
        preset=closed.preset,
        members=tuple(sorted((ReportPin(r.member, pin) for r, pin in reports), key=lambda entry: entry.member)),
        shards=tuple(sorted((s for r in parts for s in r.shards), key=lambda shard: shard.paths)),
        symlinks=tuple(sorted({s for r in parts for s in r.symlinks}, key=lambda link: link.path)),
        directories=_directories(parts),
        trackers=tuple(sorted({t for r in parts for t in r.trackers}, key=lambda entry: entry.path)),
        sealed_at=sealed_at,
    )
    check_manifest(sealed)
    return sealed


def _directories(parts: Sequence[MemberReport]) -> tuple[Directory, ...]:
    """Every member has the directories of its own shards, so many report the same one: the latest time stands."""
    found: dict[str, Directory] = {}
    for entry in sorted((d for r in parts for d in r.directories), key=lambda entry: (entry.mtime_ns, entry.mode)):
        found[entry.path] = entry
    return tuple(found[path] for path in sorted(found))


def same_manifest(theirs: Manifest, ours: Manifest) -> bool:
    """Return whether a manifest repeats another: everything but the time it was sealed."""
    return msgspec.structs.replace(theirs, sealed_at=ours.sealed_at) == ours


def evidence(
    sealed: Manifest,
    pin: Pin,
    *,
    level: Literal["checksum", "bytes"],
    member: str,
    checks: Sequence[str],
    at: str,
    loaded: Loaded | None = None,
) -> TestEvidence:
    """Return `test.json` for a manifest whose restore test has passed; `loaded` makes it one of the level `load`."""
    return TestEvidence(
        run=sealed.run,
        generation=sealed.generation,
        attempt=sealed.attempt,
        manifest=pin,
        level="load" if loaded else level,
        tested_by=member,
        epoch=sealed.epoch,
        shards=len(sealed.shards),
        bytes=sealed.size,
        checks=tuple(checks),
        tested_at=at,
        loaded=loaded,
    )


def same_evidence(theirs: TestEvidence, ours: TestEvidence) -> bool:
    """Return whether evidence speaks of the same manifest; any passed test of it will do."""
    return theirs.manifest == ours.manifest
