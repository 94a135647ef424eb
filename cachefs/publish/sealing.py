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
    Abandoned,
    Close,
    Directory,
    Loaded,
    Manifest,
    MemberReport,
    MemberTest,
    Open,
    Order,
    Pin,
    ReportPin,
    Shard,
    TestEvidence,
    Tracker,
    tree_digest,
)
from cachefs.formats.records import AttemptRecord, ShardRecord, SharedRecord
from cachefs.restore.layout import check_manifest
from cachefs.restore.shards import Source

CLOSED_BY = "closed by "
"""How the signal of a save begins that was closed because another member has seen the close signal."""
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


def opening(
    attempt: AttemptRecord,
    *,
    epoch: int,
    ordinal: int,
    owner: str,
    members: Sequence[str],
    count: int,
    again: bool,
    resumed: bool,
) -> Open:
    """Return `open.json`: the set of members whose reports the manifest will need is fixed here (I16), or their number
    when their names are not known.
    """
    return Open(
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.attempt,
        step=attempt.step,
        epoch=epoch,
        ordinal=ordinal,
        owner=owner,
        members=tuple(sorted(members)),
        count=count,
        kind=attempt.kind,
        opened_at=rfc3339(attempt.opened_at),
        wish=attempt.wish,
        again=again,
        resumed=resumed,
    )


def same_open(theirs: Open, ours: Open) -> bool:
    """An attempt id is never used twice, so an open record that stands was written by an earlier process of ours: its
    epoch, ordinal and owner hold.
    """
    names = ("run", "generation", "attempt", "step", "members", "count", "kind")
    return theirs.epoch <= ours.epoch and all(getattr(theirs, name) == getattr(ours, name) for name in names)


def closing(attempt: AttemptRecord, member: str) -> Close:
    """Return `close.json`."""
    return Close(
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.key,
        member=member,
        preset=attempt.preset,
        signal=attempt.signal,
        strength=attempt.strength,
        closed_at=rfc3339(attempt.closed_at if attempt.closed_at is not None else attempt.opened_at),
        rewritten=attempt.rewritten,
    )


def same_close(theirs: Close, ours: Close) -> bool:
    """Whichever member saw the signal first has written it."""
    return (theirs.run, theirs.generation, theirs.attempt) == (ours.run, ours.generation, ours.attempt)


def closed_together(attempt: AttemptRecord, standing: Close, member: str) -> str:
    """Return why this member's part may be of another save than the one whose close record stands, or "".

    A save that stays open here while it is closed elsewhere takes in the next save of its name: then its files are
    written a second time. The member whose signal it was has the bytes of that signal's save in any case.
    """
    if standing.member == member:
        return ""
    if attempt.rewritten:
        return f"files were written again before it was closed, and {standing.member} has seen the close signal"
    if standing.rewritten and not attempt.signal.startswith(CLOSED_BY):
        return f"both {member} and {standing.member} have seen a close signal, and files were written again between"
    return ""


def report(
    attempt: AttemptRecord, shards: Iterable[ShardRecord], *, member: str, host: str, writer: str
) -> MemberReport:
    """Return the member's report of a flushed attempt.

    Raises CorruptError when a shard has no pin, or one that does not fit what was pinned in staging.
    """
    return MemberReport(
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.key,
        member=member,
        host=host,
        writer=writer,
        shards=tuple(sorted((_shard(record, member) for record in shards), key=lambda shard: shard.paths)),
        symlinks=tuple(sorted(attempt.symlinks, key=lambda link: link.path)),
        directories=tuple(sorted(attempt.directories, key=lambda entry: entry.path)),
        trackers=tuple(sorted(attempt.trackers, key=lambda tracker: tracker.path)),
        save=attempt.attempt,
    )


def empty_report(record: SharedRecord, *, member: str, host: str, writer: str, error: str = "") -> MemberReport:
    """Return the report of a member that has nothing of a save, or with `error` cannot take part in its attempt."""
    return MemberReport(
        run=record.run,
        generation=record.generation,
        attempt=record.attempt,
        member=member,
        host=host,
        writer=writer,
        shards=(),
        error=error,
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
    opened: Open,
    closed: Close,
    reports: Sequence[tuple[MemberReport, Pin]],
    *,
    place: Callable[[str], str],
    epoch: int,
    owner: str,
    sealed_at: str,
) -> Manifest:
    """Return the manifest of an attempt from the reports of exactly the members that `open.json` declares.

    `place` is the prefix of a member's shards in this attempt. A file that several members have is taken once, if its
    bytes are the same. Raises CorruptError, which names the member, when the set is not exact, a member cannot take
    part, a report speaks of another save or of shards outside their place, or the paths of all members together are not
    one sound tree (restore/layout.py).
    """
    named = [member_report.member for member_report, _ in reports]
    expected = f"exactly {sorted(opened.members)}" if opened.members else f"{opened.count} different ones"
    exact = Counter(named) == Counter(opened.members) if opened.members else len(set(named)) == len(named)
    if not exact or len(named) != opened.count:
        raise CorruptError(f"reports of members {sorted(named)}, expected {expected}")
    for member_report, pin in reports:
        if member_report.error:
            raise CorruptError(f"member {member_report.member} cannot take part: {member_report.error}")
        save = (member_report.run, member_report.generation, member_report.attempt)
        if save != (opened.run, opened.generation, opened.attempt):
            raise CorruptError(f"{pin.key} is a report of another save than {opened.generation}")
        if any(shard.member != member_report.member for shard in member_report.shards):
            raise CorruptError(f"{pin.key} reports shards of another member")
        foreign = [shard for shard in member_report.shards if not shard.pin.key.startswith(place(member_report.member))]
        if foreign:
            raise CorruptError(f"{pin.key} reports {foreign[0].paths[0]} with the bytes of another attempt")
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
        shards=_shards(parts),
        symlinks=tuple(sorted({s for r in parts for s in r.symlinks}, key=lambda link: link.path)),
        directories=_directories(parts),
        trackers=_trackers(parts, closed.member),
        sealed_at=sealed_at,
    )
    check_manifest(sealed)
    return sealed


def _shards(parts: Sequence[MemberReport]) -> tuple[Shard, ...]:
    """Every file once: a file that every node writes (a configuration, a tokenizer) is the same on all of them."""
    found: dict[tuple[str, ...], Shard] = {}
    for one in sorted((s for r in parts for s in r.shards), key=lambda shard: (shard.paths, shard.member)):
        first = found.setdefault(one.paths, one)
        if (first.pin.sha256, first.pin.size) != (one.pin.sha256, one.pin.size):
            raise CorruptError(
                f"members {first.member} and {one.member} have different bytes in {one.paths[0]}",
                hint="ranks on different nodes wrote the same file name: give each rank its own",
            )
    return tuple(found.values())


def _trackers(parts: Sequence[MemberReport], closer: str) -> tuple[Tracker, ...]:
    """Each tracker once, as the member that saw the close signal has it, or else the first that has one."""
    found: dict[str, Tracker] = {}
    for one in sorted(parts, key=lambda part: (part.member != closer, part.member)):
        for tracker in one.trackers:
            found.setdefault(tracker.path, tracker)
    return tuple(found[path] for path in sorted(found))


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
    testers: Sequence[str] = (),
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
        testers=tuple(testers),
        loaded=loaded,
    )


def same_evidence(theirs: TestEvidence, ours: TestEvidence) -> bool:
    """Return whether evidence speaks of the same manifest; any passed test of it will do."""
    return theirs.manifest == ours.manifest


def member_test(
    sealed: Manifest, pin: Pin, shards: Sequence[Shard], *, level: str, member: str, error: str, at: str
) -> MemberTest:
    """Return the evidence of one member's share of a restore test; `error` says what was wrong."""
    return MemberTest(
        run=sealed.run,
        generation=sealed.generation,
        attempt=sealed.attempt,
        manifest=pin,
        member=member,
        level="checksum" if level == "checksum" else "bytes",
        shards=len(shards),
        bytes=sum(shard.pin.size for shard in shards),
        error=error,
        tested_at=at,
    )


def same_test(theirs: MemberTest, ours: MemberTest) -> bool:
    """Return whether a share was tested before: of the same manifest, with the same result."""
    return (theirs.manifest, bool(theirs.error)) == (ours.manifest, bool(ours.error))


def ended(attempt: AttemptRecord, *, epoch: int, owner: str, at: str) -> Abandoned:
    """Return `abandoned.json`."""
    return Abandoned(
        run=attempt.run,
        generation=attempt.generation,
        attempt=attempt.key,
        epoch=epoch,
        owner=owner,
        reason=attempt.error,
        ended_at=at,
    )


def same_end(theirs: Abandoned, ours: Abandoned) -> bool:
    """An attempt ends once; whichever owner said so first is heard."""
    return (theirs.run, theirs.attempt) == (ours.run, ours.attempt)
