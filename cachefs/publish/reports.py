"""The answers to an attempt of several members, as its owner counts them: it reads, pure functions decide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
import trio

from cachefs.errors import CorruptError
from cachefs.formats.manifest import MemberReport, Order
from cachefs.formats.records import AttemptRecord
from cachefs.journal import Journal
from cachefs.publish.settings import Confirm, Settings
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen


class Verdict(msgspec.Struct, frozen=True):
    """Why an attempt can never be complete, or what it waits for; neither when all members have answered."""

    reason: str = ""
    waits: str = ""

    @property
    def complete(self) -> bool:
        """Return whether every member has answered, and none against it."""
        return not self.reason and not self.waits


class Reports:
    """The reports of the attempts of which this daemon is the owner. Each is read once: it is create-only."""

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        settings: Settings,
        *,
        granted: Callable[[str, str], None],
        confirm: Confirm,
    ) -> None:
        """`granted` hears of each run and save that a report is about, `confirm` of a report that cannot be read."""
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._granted = granted
        self._confirm = confirm
        self._reports: dict[str, dict[str, MemberReport]] = {}
        self._unreadable: dict[str, str] = {}
        """By attempt: why a report cannot be read."""
        self._since: dict[str, float] = {}
        """By attempt: since when the members that are silent can be called missing."""

    def of(self, attempt: str) -> Collection[MemberReport]:
        """Return the reports that were read of an attempt."""
        return self._reports.get(attempt, {}).values()

    def forget(self, attempt: str) -> None:
        """Drop what is known of an attempt that is over."""
        self._reports.pop(attempt, None)
        self._unreadable.pop(attempt, None)
        self._since.pop(attempt, None)

    async def read(self, attempt: AttemptRecord) -> None:
        """Read the reports that have come since the last time. Raises the store's errors."""
        reports = self._reports.setdefault(attempt.attempt, {})
        keys = self._writes.keys
        listing = await self._writes.hop(self._writes.store.list, keys.members(attempt.run, attempt.attempt))
        for key in listing.keys:
            member = keys.name_of(key)
            if member in reports:
                continue
            try:
                report = await self._writes.small(key, MemberReport)
            except CorruptError as error:  # it is create-only: it will never be another
                await self._confirm(error)
                self._unreadable[attempt.attempt] = f"the report of member {member} cannot be read: {error}"
                continue
            if report is not None:
                reports[member] = report
                self._granted(attempt.run, report.save)

    def judge(self, attempt: AttemptRecord, seen: Seen | None) -> Verdict:
        """Return what follows from the reports read so far, and from how long the others are silent."""
        reports = self._reports.get(attempt.attempt, {})
        found = verdict(attempt, reports)
        reason = self._unreadable.get(attempt.attempt) or found.reason
        if not reason and found.complete:
            return found
        if not reason and attempt.foreign:
            reason = overtaken(attempt, seen)
        if self._is_reported(attempt, reports):
            since = self._since.setdefault(attempt.attempt, trio.current_time())
            if not reason and trio.current_time() - since >= self._settings.deadline:
                reason = f"{found.waits} for {self._settings.deadline:g} s: a member is missing"
        return Verdict(reason=reason) if reason else found

    def _is_reported(self, attempt: AttemptRecord, reports: Mapping[str, MemberReport]) -> bool:
        """Return whether the members have had their say, so that those who are silent can be called missing.

        An attempt in which this member has a part waits for its own report. Of any other nobody here knows when it is
        written; it counts from the first report or the close on, or at once when its members are not ours: it was left
        by a job on other nodes.
        """
        if not attempt.foreign:
            return attempt.report is not None
        with self._journal.read() as txn:
            shared = txn.shared.get(attempt.attempt)
        closed = shared is not None and (shared.close is not None or shared.refused != "")
        ours = not self._settings.names or set(attempt.members) <= set(self._settings.names)
        return bool(reports) or closed or not ours


def verdict(attempt: AttemptRecord, reports: Mapping[str, MemberReport]) -> Verdict:
    """Return what the reports alone say of an attempt; pure."""
    for member, report in sorted(reports.items()):
        if report.error:
            return Verdict(reason=f"member {member} cannot take part: {report.error}")
    if attempt.members:
        others = sorted(set(reports) - set(attempt.members))
        if others:
            return Verdict(reason=f"member {others[0]} has reported and is none of {', '.join(attempt.members)}")
        missing = sorted(set(attempt.members) - set(reports))
        waits = f"waits for the reports of {', '.join(missing)}" if missing else ""
    else:
        if len(reports) > attempt.count:
            here = f"{len(reports)} members have reported, {attempt.count} were expected: {', '.join(reports)}"
            return Verdict(reason=here)
        here = ", ".join(sorted(reports)) or "none"
        waits = f"waits for the reports of {attempt.count} members, has {here}" if len(reports) < attempt.count else ""
    if not waits and not any(report.shards for report in reports.values()):
        return Verdict(reason="no member has a file of it")
    return Verdict(waits=waits)


def overtaken(attempt: AttemptRecord, seen: Seen | None) -> str:
    """Return why an attempt whose reports are not there will never be promoted, "" when it may be; pure.

    `seen` is the run's pointer. Without this the attempts of jobs that are gone would stay on the list for ever.
    """
    published = seen.pointer.published if seen is not None else None
    if published is None or attempt.opened_epoch is None or attempt.ordinal is None:
        return ""
    if Order(step=attempt.step, epoch=attempt.opened_epoch, ordinal=attempt.ordinal) > published.order:
        return ""
    return f"superseded: {published.generation} was published before all members of this one had reported"
