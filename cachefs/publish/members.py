"""What this member does for attempts of several members: finds them, joins its saves to them, hears of their close.

A look reads the run's pointer, whose list names the open attempts, and for each of them one small object: its close
record until there is one, then the manifest. Everything a look finds out is in the journal before anything follows from
it (SharedRecord, joined.py), so a restart goes on. finding.py finds the attempts, joining.py decides which save belongs
to which; the answers are given in answering.py, the owner is asked for attempts in wishes.py; the owner's side is
collecting.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import structlog
import trio

from cachefs.errors import CorruptError, UnavailableError
from cachefs.formats.manifest import Close
from cachefs.formats.records import AttemptRecord, SharedRecord
from cachefs.journal import Journal
from cachefs.publish import joined, joining, sealing
from cachefs.publish.answering import Answers
from cachefs.publish.finding import Finder
from cachefs.publish.joining import Absent, Decision, Join, Refuse
from cachefs.publish.problems import Problems
from cachefs.publish.settings import Confirm, Settings, sure
from cachefs.publish.wishes import OwnWishes
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen, read_pointer

_log = structlog.get_logger(__name__)


class CloseAsked(msgspec.Struct, frozen=True):
    """Another member saw the close signal: close this member's save as well.

    Unless files of it were written a second time, at whatever time: they may belong to the next save. That this member
    has seen the attempt open since does not rule that out, for the close record may have been held up. After a weak
    signal files must be quiet first.
    """

    save: AttemptRecord
    close: Close

    @property
    def weak(self) -> bool:
        """Return whether the signal proves little about other members."""
        return self.close.strength not in ("A", "B")


class Member:
    """This member's part in the attempts of its runs. Not for concurrent looks at one run."""

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        settings: Settings,
        nursery: trio.Nursery,
        *,
        started: int,
        close: Callable[[CloseAsked], None],
        problems: Problems,
        joined: Callable[[], None] = lambda: None,
        confirm: Confirm = sure,
    ) -> None:
        """Shares of restore tests are read in `nursery`. `started` is the serial of the newest save when the daemon
        started. `close` carries a CloseAsked out; it is asked again at every look until the save is closed. `joined` is
        called when there may be something to send, `confirm` before damage is reported.
        """
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._started = started
        self._close = close
        self._joined = joined
        self._problems = problems
        self._confirm = confirm
        self._answers = Answers(journal, writes, settings, nursery, confirm, problems, started)
        self._closes: dict[str, Close] = {}
        """Close records of attempts that this daemon opened."""
        self._absent_since: dict[str, float] = {}
        self._wishes = OwnWishes(journal, writes, settings)
        self._finder = Finder(journal, writes, settings, self._wishes, problems, confirm)

    async def look(self, run: str, *, new: bool = False) -> Seen | None:
        """Look at a run once and do what follows; return its pointer. `new` says that the run did not exist when this
        daemon had begun to look. Raises the store's errors: look again later.
        """
        with self._journal.read() as txn:
            record = txn.run(run)
        seen = await self._writes.hop(read_pointer, self._writes.store, self._writes.keys, run)
        seq = seen.pointer.seq if seen is not None else 0
        if seq < record.seq:
            raise UnavailableError(f"the pointer of run {run!r} reads older than it was: seq {seq} after {record.seq}")
        complete = True
        if seen is not None:
            await self._finder.miss(run, seen, record.seq)
            complete = await self._finder.learn(run, seen, late=not record.looked and not new)
            await self._hear(run)
            await self._give_up(run)
            await self._decide(run)
            await self._answers.answer(run, self._absent_since)
            await self._answers.test(run, seen)
            await self._answers.conclude(run, seen)
        else:
            await self._give_up(run)
        await self._want(run)
        if complete and (not record.looked or seq != record.seq):
            await self._journal.write(partial(joined.looked, run, seq))
        return seen

    # the close

    async def _hear(self, run: str) -> None:
        """Tell the others of our close, and hear of theirs."""
        saves = {save.attempt: save for save in joined.saves(self._journal, run)}
        for record in joined.shared(self._journal, run):
            save = saves.get(record.local)
            if record.refused:
                continue
            try:
                close = record.close or await self._closed(run, record.attempt, save)
            except CorruptError as error:  # create-only as well; without it, nobody can tell what was closed
                await self._confirm(error)
                await self._journal.write(partial(joined.put, msgspec.structs.replace(record, refused=str(error))))
                continue
            if record.close is None and close is not None:
                await self._journal.write(partial(joined.put, msgspec.structs.replace(record, close=close)))
            self._ask(record.attempt, save, close)
        for save in saves.values():
            if save.count > 1 and not save.shared and save.opened_epoch is not None and not save.state.final:
                close = self._closes.get(save.attempt)
                with self._problems.passed(run):  # at the report the attempt ends
                    close = close or await self._closed(run, save.attempt, save)
                if close is not None:
                    self._closes[save.attempt] = close
                self._ask(save.attempt, save, close)
            elif save.state.final:
                self._closes.pop(save.attempt, None)

    async def _closed(self, run: str, attempt: str, save: AttemptRecord | None) -> Close | None:
        """Return the close record of an attempt; when our own save is closed, there is one afterwards."""
        if save is not None and save.closed_at is not None and not save.state.final:
            ours = sealing.closing(save, self._settings.member)
            standing, _ = await self._writes.create(self._writes.keys.close(run, attempt), ours, sealing.same_close)
            return standing
        return await self._writes.small(self._writes.keys.close(run, attempt), Close)

    def _ask(self, attempt: str, save: AttemptRecord | None, close: Close | None) -> None:
        if close is not None and save is not None and save.closed_at is None and not save.state.final:
            self._close(CloseAsked(save, close))

    # joining

    async def _give_up(self, run: str) -> None:
        """End the saves whose name was written again before they found an attempt (joining.superseded)."""
        if self._settings.count == 1:
            return
        offers, saves = joined.shared(self._journal, run), joined.saves(self._journal, run)
        for generation in {save.generation for save in saves if save.waits}:
            same = [save for save in saves if save.generation == generation]
            undecided = [one for one in offers if one.generation == generation and joined.undecided(one)]
            over = joining.superseded(same, undecided, self._started)
            for save in same:
                if save.attempt in over:
                    await self._journal.write(partial(joined.abandon, save, joining.WRITTEN_AGAIN))

    async def _decide(self, run: str) -> None:
        """Decide which saves belong to the attempts that this member has no part in yet (joining.py)."""
        saves, member = joined.saves(self._journal, run), self._settings.member
        offers: dict[str, list[SharedRecord]] = {}
        for record in joined.shared(self._journal, run):
            if joined.undecided(record):
                offers.setdefault(record.generation, []).append(record)
        for generation, group in offers.items():
            same = [save for save in saves if save.generation == generation]
            for save in same:
                if save.opened_epoch is None and (reason := joining.unwanted(group, save, member)):
                    await self._journal.write(partial(joined.abandon, save, reason))
            decisions = joining.decide(group, same, us=self._settings.membership, started=self._started)
            absent = {one.shared for one in decisions if isinstance(one, Absent)}
            for record in group:
                if record.attempt in absent:
                    self._absent_since.setdefault(record.attempt, trio.current_time())
                else:
                    self._absent_since.pop(record.attempt, None)
            for decision in decisions:
                await self._carry_out(run, generation, decision)

    async def _carry_out(self, run: str, generation: str, decision: Decision) -> None:
        match decision:
            case Join():
                await self._journal.write(partial(joined.join, decision))
                self._joined()
            case Refuse():
                _log.warning("cannot take part", run=run, generation=generation, reason=decision.reason)
                await self._journal.write(partial(joined.refuse, decision))

    async def _want(self, run: str) -> None:
        """Ask the owner for the saves that find no attempt; end those of a name that is in doubt."""
        known = {
            record.generation
            for record in joined.shared(self._journal, run)
            if not record.report and not record.refused
        }
        lonely = [s for s in joined.saves(self._journal, run) if s.waits and s.generation not in known]
        for save in lonely:
            if (doubt := self._doubtful(save)) is not None:
                await self._journal.write(partial(joined.abandon, save, joining.doubts(doubt)))
        if not self._settings.owner:  # else the publisher opens them
            await self._wishes.ask(run, lonely)

    def _doubtful(self, save: AttemptRecord) -> AttemptRecord | None:
        same = [one for one in joined.saves(self._journal, save.run) if one.generation == save.generation]
        return joining.doubtful(same, self._started) if self._settings.count > 1 else None
