"""Two owners of one run under every schedule, and what must hold after each of their requests.

An event is one of
- a process sends its next request and hears the answer,
- for a write of the pointer, while faults are left: the answer is lost; the request is lost; it is held back and lands
  later; it is delivered and a copy lands later; it is refused with 409,
- a request that was held back, or a copy, lands,
- while kills are left: a process dies before its next request, or with a write under way that lands later; a new
  process of the same member starts,
- in one scenario: an operator puts a delete marker on the pointer.

Events that commute are run in one order only. What changes nothing that the other sees and needs no answer (a death, a
request that is lost or held, a 409) comes right after the process's last request. Of two neighbouring requests that
changed nothing (reads, failed writes) only one order is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cachefs.errors import CachefsError, CorruptError, FencedError
from cachefs.formats.codec import decode, encode
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Order, Pin
from cachefs.formats.pointer import OpenAttempt, Pointer, Prev, Published
from cachefs.formats.records import RunRecord
from cachefs.publish.promotion import Identity, announce, promote, published_since, take_epoch
from cachefs.publish.rules import Refused
from cachefs.publish.writes import Writes
from cachefs.store.base import CREATE_ONLY
from cachefs.store.memory import MemoryStore, _Version
from tests.publish.schedules import Choose, ParkingHop, Process, Request, send_quietly

RUN = "exp"
KEYS = Keys()
KEY = KEYS.pointer(RUN)
STEPS = {"a": 100, "b": 200}


async def _no_pause(error: CachefsError, retries: int) -> None:
    pass


@dataclass
class Event:
    """Something that may happen next. `local` changes nothing that another process could see."""

    label: str
    who: str
    act: Callable[[], None]
    local: bool = False


class World:
    """One schedule in progress."""

    def __init__(
        self,
        choose: Choose,
        *,
        existing: bool,
        faults: int = 0,
        kills: int = 0,
        hide: bool = False,
        promotes: bool = True,
        members: str = "ab",
    ) -> None:
        self.choose = choose
        self.existing, self.promotes = existing, promotes
        self.store = MemoryStore(now=lambda: 0.0)
        self.faults, self.kills, self.hide = faults, kills, hide
        self.hidden = False
        self.serial = 0
        self.records: dict[str, RunRecord] = {}
        self.sealed: dict[str, int] = {}
        self.tested: set[str] = set()
        self.held: list[Request] = []
        self.events: list[str] = []
        self.versions: list[tuple[Pointer, str, str]] = []
        self._last = self._last_idle = ""
        if existing:
            opened = tuple(OpenAttempt(f"step-{STEPS[member]}", member) for member in members)
            old = Pointer(run=RUN, kind="grant", seq=1, epoch=1, owner="z/0", nonce=self.nonce(), at="", open=opened)
            self._put(old)
        self.check()
        self.processes = [self.start(member) for member in members]

    def nonce(self) -> str:
        self.serial += 1
        return f"n{self.serial}"

    def _put(self, pointer: Pointer) -> None:
        self.store.put(KEY, encode(pointer), condition=CREATE_ONLY)

    def start(self, member: str) -> Process:
        who = Identity(f"{member}/{self.nonce()}", nonce=self.nonce, at=lambda: "")
        return Process(member, self.main(member, who))

    async def main(self, member: str, who: Identity) -> Published | Refused | None:
        """What a publisher does with one attempt; the journal is `records`, `sealed` and `tested`.

        Without a pointer to begin with the attempt is announced first; without `promotes` that is all.
        """
        writes = Writes(self.store, KEYS, ParkingHop(), _no_pause)
        epoch = await take_epoch(writes, RUN, who, self.records.get(member))
        self.records[member] = RunRecord(RUN, epoch=epoch, owner=who.owner)
        if member in self.sealed:
            seen = await writes.pointer(RUN)
            if seen is None:
                raise CorruptError("hidden")
            published = await published_since(writes, RUN, seen, member, self.sealed[member])
            if published is not None:
                return published
        if not self.existing:
            opened = OpenAttempt(f"step-{STEPS[member]}", member)
            refused = await announce(writes, RUN, opened, who, epoch=epoch, ended=())
            assert refused is None
            if not self.promotes:
                return None
        self.sealed[member] = epoch
        self.tested.add(member)
        order = Order(step=STEPS[member], epoch=1, ordinal=1)
        manifest = Pin(key=f"{member}-{epoch}", version_id="v", size=1, sha256="")
        candidate = Published(generation=f"step-{order.step}", attempt=member, order=order, manifest=manifest)
        return await promote(writes, RUN, candidate, who, epoch=epoch, sealed_epoch=epoch)

    # events

    def run(self) -> bool:
        """Run to the end and check it; return False for a schedule that is equal to another one."""
        try:
            while options := self.options():
                event = options[self.choose(len(options))] if len(options) > 1 else options[0]
                if not self.happen(event):
                    return False
            if any(process.request for process in self.processes):  # every way to go on would be swapped
                return False
            self.check_end()
        except AssertionError as error:
            raise AssertionError(f"{error}\nschedule: " + ", ".join(self.events)) from error
        return True

    def happen(self, event: Event) -> bool:
        """Let an event happen and check the invariants; return whether the schedule is one to follow."""
        before = len(self.versions) + self.hidden
        self.events.append(event.label)
        event.act()
        self.check()
        idle = not event.local and before == len(self.versions) + self.hidden
        swapped = idle and self._last_idle > event.who
        self._last, self._last_idle = event.who, event.who if idle else ""
        return not swapped

    def options(self) -> list[Event]:
        options: list[Event] = []
        for process in self.processes:
            name, request = process.name, process.request
            if request is None:
                continue
            if request.writes or name >= self._last_idle:  # a read would only be found to be swapped
                options.append(Event(f"{name} {request.name}s", name, process.deliver))
            if request.writes and self.faults:
                options.append(Event(f"{name} loses the answer", name, self._fault(process.lose_answer)))
                options.append(Event(f"{name}'s request is copied", name, self._fault(self._copy, process)))
            if self._last != name:
                continue
            if request.writes and self.faults:
                options.append(Event(f"{name} loses the request", name, self._fault(process.time_out), True))
                options.append(Event(f"{name}'s request is held", name, self._fault(self._hold, process), True))
                options.append(Event(f"{name} gets 409", name, self._fault(process.refuse), True))
            if self.kills and name == "a":
                options.append(Event("a dies", name, partial(self._kill, process, in_flight=False), True))
                if request.writes:
                    options.append(Event("a dies writing", name, partial(self._kill, process, in_flight=True), True))
        if self.held:
            options.append(Event("a held request lands", "~", self._land))
        if self.hide and not self.hidden and self.versions and not self._creating():
            options.append(Event("operator hides the pointer", "operator", self._hide))
        return options

    def _creating(self) -> bool:
        requests = [*self.held, *(process.request for process in self.processes if process.request)]
        conditions = [getattr(request.call, "keywords", {}).get("condition") for request in requests if request.writes]
        return any(condition is not None and condition.if_none_match for condition in conditions)

    def _fault(self, act: Callable[..., None], *args: Any) -> Callable[[], None]:
        def event() -> None:
            self.faults -= 1
            act(*args)

        return event

    def _land(self) -> None:
        send_quietly(self.held.pop(0))

    def _hold(self, process: Process) -> None:
        assert process.request is not None
        self.held.append(process.request)
        process.time_out()

    def _copy(self, process: Process) -> None:
        assert process.request is not None
        self.held.append(process.request)
        process.deliver()

    def _kill(self, process: Process, *, in_flight: bool) -> None:
        self.kills -= 1
        if in_flight and process.request is not None:
            self.held.append(process.request)
        process.kill()
        self.processes[self.processes.index(process)] = self.start(process.name)

    def _hide(self) -> None:
        # The store lets nobody delete outside the probe, so the marker is put past its door.
        self.hidden = True
        order = self.store._next()
        self.store._insert(KEY, _Version(order, f"v{order:06d}", 0.0))

    # what must hold

    def check(self) -> None:
        """Check the invariants on the pointer's whole history, after every event."""
        entries = [entry for entry in self.store.list_versions(KEY) if not entry.is_marker]
        if len(entries) == len(self.versions):
            return
        assert len(entries) == len(self.versions) + 1, "one event wrote twice"
        found = self.store.get(KEY, entries[0].version_id)
        assert found is not None
        info, body = found
        new = decode(body, Pointer, KEY)
        assert not self.hidden, "the run was bootstrapped a second time (race 8)"
        check_successor(self.versions[-1] if self.versions else None, new)
        assert info.etag not in {etag for _, etag, _ in self.versions}, "I8: two equal bodies"
        epochs = {pointer.epoch: pointer.owner for pointer, _, _ in self.versions}
        if new.kind == "grant":
            assert new.owner not in epochs.values(), "I9: a process took a second epoch"
        elif new.kind == "open":
            assert new.open[-1].attempt == new.owner.split("/")[0], "I7: opened by a process that is not the owner"
        else:
            assert new.published is not None
            attempt = new.published.attempt
            assert attempt in self.tested, "I5: promoted before it was tested"
            assert new.published.manifest.key == f"{attempt}-{new.epoch}", (
                "I7: promoted under another epoch than sealed"
            )
            assert new.owner.startswith(f"{attempt}/"), "I7: promoted by a process that is not the owner"
        self.versions.append((new, info.etag, info.version_id))

    def check_end(self) -> None:
        """Check that what each process was told is what happened, now that nothing can land any more."""
        history = [pointer.published for pointer, _, _ in self.versions if pointer.kind == "promote"]
        named = [published.attempt for published in history if published]
        assert len(set(named)) == len(named), "an attempt was published twice"
        current = self.versions[-1][0]
        for process in self.processes:
            if isinstance(process.result, Published):
                assert process.result in history, "told published, but the pointer never named it"
            elif isinstance(process.result, Refused):
                assert process.name not in named, "told refused, but it was published"
            elif isinstance(process.error, FencedError):
                assert process.name not in named, "told fenced, but it was published"
                assert not current.owner.startswith(f"{process.name}/"), "the owner was told it was fenced"
            elif process.error is None:
                opened = {entry.attempt for pointer, _, _ in self.versions for entry in pointer.open}
                assert process.name in opened, "told announced, but the pointer never listed it"
            else:
                assert self.hidden, f"{process.name} ended with {process.error!r}"
                assert isinstance(process.error, CorruptError)


def check_successor(old: tuple[Pointer, str, str] | None, new: Pointer) -> None:
    """Check one write of the pointer against the version it replaced."""
    if old is None:
        assert (new.seq, new.epoch, new.prev, new.kind) == (1, 1, None, "grant"), "I6: a run starts with a grant"
        return
    before, etag, version_id = old
    assert new.seq == before.seq + 1, "I6: seq rises by one"
    assert new.prev == Prev(etag=etag, version_id=version_id, seq=before.seq), "I6: the chain is whole"
    if new.kind == "grant":
        assert new.epoch == before.epoch + 1, "I6: each grant takes the next epoch"
        assert new.published == before.published, "a grant publishes nothing"
        assert new.open == before.open, "a grant ends nothing"
    elif new.kind == "open":
        assert (new.epoch, new.owner) == (before.epoch, before.owner), "I7: opened after a later grant"
        assert (new.published, new.open[:-1]) == (before.published, before.open), "opening changes nothing else"
    else:
        assert (new.epoch, new.owner) == (before.epoch, before.owner), "I7: promoted after a later grant"
        assert new.published is not None
        promoted = new.published.attempt
        assert promoted in {entry.attempt for entry in before.open}, "promoted without having been open"
        assert promoted not in {entry.attempt for entry in new.open}, "published and still open"
        assert before.published is None or new.published.order > before.published.order, "I13: the order must rise"


def world(**given: Any) -> Callable[[Choose], bool]:
    """Return a scenario for `explore`."""
    return lambda choose: World(choose, **given).run()
