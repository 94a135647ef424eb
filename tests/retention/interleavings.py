"""One run, several processes, every order of their requests to the store.

    collector   one pass of garbage collection
    reader      finds a generation, leases it, reads all of it, ends the lease; may die anywhere
    rollback    finds a generation, leases and validates it, moves the pointer back to it, ends the lease
    ender       takes the open attempt off the pointer's list, as its owner does with what it abandons
    promoter    promotes an attempt that is open, sealed and tested
    opener      announces an attempt whose open record an earlier process has left, uploads, seals, tests, promotes

Two neighbouring requests of two processes that do not concern the same keys, or change nothing, can be exchanged: of
all orders that differ only by such exchanges one is run.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from cachefs.errors import CachefsError, NotFoundError
from cachefs.formats.pointer import OpenAttempt, Published
from cachefs.publish import rules
from cachefs.publish.promotion import Identity, announce, promote
from cachefs.publish.rollback import RolledBack, rollback
from cachefs.publish.rules import Already, Refused
from cachefs.publish.writes import Writes
from cachefs.restore import leases
from cachefs.restore.leases import LEASE_LIFE, Held
from cachefs.restore.reader import history, load_manifest
from cachefs.restore.verify import verify, verify_shard
from cachefs.retention.executor import Collector
from tests.publish.schedules import Choose, ParkingHop, Process, Request
from tests.retention.world import DAY, HOUR, LEAST, World, memory
from tests.store.faults import EFFECTS, Call

T = TypeVar("T")


async def no_pause(error: CachefsError, retries: int) -> None:
    pass


class Hop(ParkingHop):
    """Does not park where the moment does not matter: old versions of a pointer stay as they are."""

    async def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if fn.__name__ == "_older":
            return fn(*args, **kwargs)
        return await super().__call__(fn, *args, **kwargs)


class Lost(AssertionError):
    """Somebody lost what was promised to them."""


class Scene:
    """One order in progress. `world` holds step-1, which nothing keeps, step-2 and step-3, which stay. If somebody is
    to promote it, there is the open attempt `p` of step 5, sealed; if somebody is to open it, the open record of `q`,
    which was never announced. Where other garbage will do, there is no step-1. Without a reader nobody's leases concern
    others.
    """

    def __init__(self, choose: Choose, cast: Sequence[str], *, dies: bool = False) -> None:
        self.choose = choose
        self.dies = dies
        self.leases = bool({"reader", "rollback"} & set(cast))
        self.world = world = World(memory())
        world.saves(*((2, 3) if {"opener", "ender"} & set(cast) else (1, 2, 3)))
        if "promoter" in cast:
            self.candidate = world.seal(5, world.open(5, "p"))
        if "opener" in cast:
            world.open(6, "q", announced=False)
        world.wait(DAY + HOUR)
        self.trace: list[str] = []
        self._last: tuple[str, list[Call]] = ("", [])
        roles: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "collector": self.collector,
            "other collector": self.collector,
            "reader": self.reader,
            "rollback": self.rollback,
            "ender": self.ender,
            "promoter": self.promoter,
            "opener": self.opener,
        }
        self.processes = [Process(name, roles[name]()) for name in cast]

    # the cast

    def writes(self) -> Writes:
        return Writes(self.world.store, self.world.keys, Hop(), no_pause)

    async def collector(self) -> object:
        world = self.world
        made = Collector(self.writes(), LEAST, workers=1, new_id=world.new_id, at=world.at)
        return await made.collect(world.run)

    async def _read(self, held: Held) -> None:
        """Read all of a generation on which a lease is held; fail when something of it is gone."""
        hop, world = Hop(), self.world
        try:
            manifest = await hop(load_manifest, world.store, world.run, held.published)
            for shard in manifest.shards:
                await hop(verify_shard, world.store, shard, "bytes")
        except CachefsError as error:
            raise Lost(f"the holder of a lease lost what it reads: {error}") from error

    async def _take(self, generation: str) -> Held:
        world = self.world
        return await leases.take(
            world.store, world.keys, Hop(), world.run, generation, new_id=world.new_id, at=world.at
        )

    async def _end(self, held: Held) -> None:
        assert held.lease is not None
        await Hop()(self.world.store.delete_version, held.lease.key, held.lease.version_id)

    async def reader(self) -> Held:
        held = await self._take("step-1")
        await self._read(held)
        await self._end(held)
        return held

    async def rollback(self) -> RolledBack | Already:
        held = await self._take("step-1")
        await self._read(held)
        who = Identity("operator", nonce=self.world.new_id, at=self.world.at)
        done = await rollback(self.writes(), self.world.run, held.seen, held.published, who)
        await self._end(held)
        return done

    def _who(self) -> Identity:
        return Identity(self.world.owner[0], nonce=self.world.new_id, at=self.world.at)

    async def ender(self) -> str:
        return await Hop()(self._watched, self.world.keys.pointer(self.world.run), self._end_candidate)

    def _end_candidate(self) -> str:
        new = rules.end(self.world.seen, ["p"], **self.world.who())
        if new is not None:
            self.world.swap(new)
        return "ended"

    async def promoter(self) -> Published | Refused:
        epoch = self.world.owner[1]
        return await promote(
            self.writes(), self.world.run, self.candidate, self._who(), epoch=epoch, sealed_epoch=epoch
        )

    async def opener(self) -> Published | Refused:
        world, hop, epoch = self.world, Hop(), self.world.owner[1]
        opened = OpenAttempt("step-6", "q")
        refused = await announce(self.writes(), world.run, opened, self._who(), epoch=epoch, ended=())
        if refused is not None:
            return refused
        published = await hop(self._watched, world.keys.open(world.run, "q") + " and more", partial(world.seal, 6, "q"))
        await hop(self._test, published)
        return await promote(self.writes(), world.run, published, self._who(), epoch=epoch, sealed_epoch=epoch)

    def _watched(self, key: str, act: Callable[[], T]) -> T:
        """Do several things in one request, through the store that is watched. They concern who looks at `key`."""
        world, inner = self.world, self.world.inner
        world.inner = world.store
        try:
            return act()
        finally:
            world.inner = inner

    def _test(self, published: Published) -> None:
        verify(self.world.store, load_manifest(self.world.store, self.world.run, published), "bytes", workers=1)

    # one order

    def run(self) -> bool:
        """Run to the end and check it; return False for an order that is equal to another one."""
        try:
            while any(process.request for process in self.processes):
                ready = self._ready()
                if not ready:
                    return False
                act = ready[self.choose(len(ready))] if len(ready) > 1 else ready[0]
                act()
                if any(call.operation == "delete_version" or _moves(call) for call in self._last[1]):
                    self.world.check_quickly()
            self._check_end()
        except AssertionError as error:
            raise AssertionError(f"{error}\norder: " + ", ".join(self.trace)) from error
        return True

    def _ready(self) -> list[Callable[[], None]]:
        """Return what may happen next, without what would lead to an order that is equal to another one."""
        who, calls = self._last
        ready = [
            partial(self._deliver, process)
            for process in self.processes
            if process.request and (process.name >= who or _concern(calls, self._calls(process.request)))
        ]
        if self.dies:
            reader = next(process for process in self.processes if process.name == "reader")
            # A death concerns nobody else: it comes right after the last request of who dies.
            if reader.request and self._last[0] == "reader":
                ready.append(partial(self._kill, reader))
        return ready

    def _calls(self, request: Request) -> list[Call]:
        """Return what a request will ask of the store. Reads are made to see it."""
        arguments = getattr(request.call, "args", ())
        match request.name:
            case "put" | "delete_version":
                calls = [Call(request.name, arguments[0])]
            case "_delete_versions":
                calls = [Call("delete_version", entry.key) for entry in arguments[0]]
            case "_watched":
                calls = [Call("put", arguments[0])]
            case _:
                before = len(self.world.store.calls)
                try:
                    request.call()
                except CachefsError:
                    pass
                calls = self.world.store.calls[before:]
                del self.world.store.calls[before:]
        return self._relevant(calls)

    def _relevant(self, calls: list[Call]) -> list[Call]:
        return calls if self.leases else [call for call in calls if "/leases/" not in call.key]

    def _deliver(self, process: Process) -> None:
        assert process.request is not None
        before = len(self.world.store.calls)
        self.trace.append(f"{process.name} {process.request.name}")
        process.deliver()
        if isinstance(process.error, AssertionError):
            raise process.error
        self._last = (process.name, self._relevant(self.world.store.calls[before:]))

    def _kill(self, process: Process) -> None:
        self.trace.append(f"{process.name} dies")
        process.kill()

    def _check_end(self) -> None:
        world = self.world
        named = [entry.published for entry in history(world.inner, world.keys, world.run)]
        for process in self.processes:
            outcome = process.error or process.result
            match process.name, outcome:
                case _, None:
                    assert process.killed, f"{process.name} returned nothing"
                case (("collector" | "other collector"), CachefsError()):
                    raise AssertionError(f"{process.name} failed: {outcome}")
                case (("promoter" | "opener"), Published()):
                    assert outcome in named, "told published, but it never was"
                case "promoter", Refused():
                    assert self.candidate not in named, "told refused, but it was published"
                case (("reader" | "rollback"), Exception()):
                    assert isinstance(outcome, NotFoundError), f"{process.name} ended with {outcome!r}"
        # Whoever is gone has left nothing that a later pass cannot remove.
        world.wait(max(LEASE_LIFE, DAY))
        for _ in range(2):
            Process("last", self.collector()).finish()
        world.check()
        alive = {one.attempt for one in (*named, *world.pointer.open)} & world.attempts()
        assert world.attempts() == alive, "garbage is left for ever"
        assert len(world.attempts()) <= 2 + len(world.pointer.open), "more is kept than the policy says"
        assert world.pointer.retired == ()
        assert world.objects("leases/") == set(), "leases are left for ever"


def _moves(call: Call) -> bool:
    return call.operation == "put" and call.key.endswith("/pointer.json")


def _concern(one: Sequence[Call], other: Sequence[Call]) -> bool:
    """Return whether the order of two requests matters: one changes what the other looks at."""
    return any(
        (a.operation in EFFECTS or b.operation in EFFECTS) and (_covers(a, b.key) or _covers(b, a.key))
        for a in one
        for b in other
    )


def _covers(call: Call, key: str) -> bool:
    return key.startswith(call.key) if call.operation.startswith("list") else key == call.key


def scene(*cast: str, **given: Any) -> Callable[[Choose], bool]:
    """Return a scenario for `explore`."""
    return lambda choose: Scene(choose, cast, **given).run()
