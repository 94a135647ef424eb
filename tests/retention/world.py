"""A run made directly in a store, for what collects its garbage, and what must hold whatever was collected.

The store's time is `now` of the module's clock: it moves only when a test moves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from cachefs.errors import CachefsError
from cachefs.formats.codec import encode
from cachefs.formats.keys import Keys
from cachefs.formats.lease import Lease
from cachefs.formats.manifest import Manifest, Open, Order, Pin, Shard, Wanted, tree_digest
from cachefs.formats.pointer import OpenAttempt, Pointer, Published
from cachefs.publish import rules
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen, history, load_manifest, read_pointer
from cachefs.restore.verify import verify
from cachefs.retention.executor import Collector, patience
from cachefs.retention.plan import Policy
from cachefs.store.base import CREATE_ONLY, Condition, ObjectStore
from cachefs.store.hop import Inline
from cachefs.store.memory import MemoryStore, _Version
from tests.store.faults import FaultyStore, Plan, no_faults

RUN = "exp/a"
HOUR, DAY = 3600.0, 86400.0
START = datetime(2026, 1, 10, tzinfo=UTC).timestamp()
LEAST = Policy(keep_last=1, keep_hourly=0, keep_daily=0, grace=DAY)
"""Keeps what is published and the one before."""


class Time:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def memory() -> MemoryStore:
    return MemoryStore("base", now=Time())


class World:
    """One run. `inner` is the store, `store` the same one with faults on the way to it."""

    def __init__(self, store: ObjectStore, *, run: str = RUN) -> None:
        self.inner = store
        self.store = FaultyStore(store)
        self._time: Callable[[], float] = store._now if isinstance(store, MemoryStore) else lambda: START
        self.keys = Keys(store.prefix)
        self.run = run
        self.serial = 0
        self.owner = ("n1/x", 0)
        self.promised: dict[str, list[Pin]] = {}
        """What the manifest of an attempt pins, and the manifest itself."""

    # time

    @property
    def now(self) -> float:
        return self._time()

    def wait(self, seconds: float) -> None:
        """Let time pass in the store."""
        assert isinstance(self._time, Time), "the time of this store cannot be moved"
        self._time.now += seconds

    def at(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def new_id(self) -> str:
        self.serial += 1
        return f"{self.serial:032x}"

    # the pointer

    @property
    def seen(self) -> Seen:
        seen = read_pointer(self.inner, self.keys, self.run)
        assert seen is not None
        return seen

    @property
    def pointer(self) -> Pointer:
        return self.seen.pointer

    def swap(self, new: object) -> None:
        """Write the next pointer."""
        assert isinstance(new, Pointer), new
        condition = Condition(if_match=new.prev.etag) if new.prev else CREATE_ONLY
        self.inner.put(self.keys.pointer(self.run), encode(new), condition=condition)

    def grant(self, owner: str = "n1/x") -> None:
        seen = read_pointer(self.inner, self.keys, self.run)
        self.swap(rules.grant(self.run, seen, owner=owner, nonce=self.new_id(), at=self.at()))
        self.owner = (owner, self.pointer.epoch)

    def who(self) -> dict[str, Any]:
        return {"owner": self.owner[0], "epoch": self.owner[1], "nonce": self.new_id(), "at": self.at()}

    # saves

    def open(self, step: int, attempt: str = "", *, announced: bool = True) -> str:
        """Open an attempt for `step`."""
        if not self.owner[1]:
            self.grant()
        attempt = attempt or self.new_id()
        made = Open(
            run=self.run, generation=f"step-{step}", attempt=attempt, step=step, epoch=1, ordinal=1, owner="n1/x",
            members=("n1",), count=1, kind="directory", opened_at=self.at(),
        )  # fmt: skip
        self.put(self.keys.open(self.run, attempt), encode(made))
        if announced:
            self.swap(rules.announce(self.seen, OpenAttempt(f"step-{step}", attempt), ended=(), **self.who()))
        return attempt

    def put(self, key: str, body: bytes) -> Pin:
        info = self.inner.put(key, body, condition=CREATE_ONLY)
        digest = hashlib.sha256(body).hexdigest()
        return Pin(key=key, version_id=info.version_id, size=len(body), sha256=digest)

    def shard(self, attempt: str, path: str, data: bytes) -> Shard:
        key = self.keys.shard(self.run, attempt, "n1", self.new_id(), path)
        digest = hashlib.sha256(data).digest()
        pin = msgspec.structs.replace(self.put(key, data), sha256=tree_digest([digest]))
        return Shard((path,), "n1", pin, max(1, len(data)), (digest.hex(),), 0o640, 0)

    def seal(self, step: int, attempt: str, *, reuse: Sequence[Shard] = (), ordinal: int = 1) -> Published:
        """Write two shards and the manifest of an attempt; return what a pointer would name."""
        own = [self.shard(attempt, name, b"%d %s" % (step, name.encode())) for name in ("model", "optim")]
        order = Order(step=step, epoch=1, ordinal=ordinal)
        made = Manifest(
            run=self.run, generation=f"step-{step}", attempt=attempt, kind="directory", order=order, epoch=1,
            owner="n1/x", preset="auto", members=(), shards=(*own, *reuse), symlinks=(), directories=(), trackers=(),
            sealed_at=self.at(),
        )  # fmt: skip
        pin = self.put(self.keys.manifest(self.run, attempt, opened=1, sealed=1), encode(made))
        self.promised[attempt] = [pin, *(shard.pin for shard in made.shards)]
        return Published(generation=f"step-{step}", attempt=attempt, order=order, manifest=pin)

    def promote(self, published: Published) -> None:
        self.swap(rules.promote(self.seen, published, sealed_epoch=self.owner[1], **self.who()))

    def save(self, step: int, attempt: str = "", **given: Any) -> Published:
        """Publish a generation."""
        attempt = self.open(step, attempt)
        published = self.seal(step, attempt, **given)
        self.promote(published)
        return published

    def saves(self, *steps: int, every: float = HOUR) -> list[str]:
        """Publish generations, one after the other in the store's time; return their attempts."""
        found = []
        for step in steps:
            found.append(self.save(step).attempt)
            if every:
                self.wait(every)
        return found

    def lease(self, attempt: str, name: str = "") -> str:
        made = Lease(run=self.run, generation="", attempt=attempt, holder="a test", created_at=self.at())
        key = self.keys.lease(self.run, name or self.new_id())
        self.put(key, encode(made))
        return key

    def wish(self, attempt: str) -> str:
        made = Wanted(run=self.run, generation="g", attempt=attempt, member="n2", kind="directory", step=1)
        key = self.keys.wanted(self.run, attempt)
        self.put(key, encode(made))
        return key

    # garbage collection

    def collector(self, policy: Policy = LEAST, *, plan: Plan = no_faults, **given: Any) -> Collector:
        self.store.plan = plan
        writes = Writes(self.store, self.keys, Inline(), patience)
        return Collector(writes, policy, workers=1, new_id=self.new_id, at=self.at, **given)

    async def collect(self, policy: Policy = LEAST, **given: Any) -> Any:
        """Make one pass."""
        return await self.collector(policy, **given).collect(self.run)

    # looking

    def attempts(self) -> set[str]:
        """Return the attempts of which anything is stored."""
        prefix = self.keys.attempts(self.run)
        keys = {entry.key for entry in self.inner.list_versions(prefix)}
        keys |= {upload.key for upload in self.inner.list_multiparts(prefix)}
        return {key.removeprefix(prefix).split("/")[0] for key in keys}

    def objects(self, below: str = "") -> set[tuple[str, str]]:
        prefix = f"{self.keys.run(self.run)}/{below}"
        return {(entry.key, entry.version_id) for entry in self.inner.list_versions(prefix)}

    def readable(self, published: Published) -> bool:
        """Return whether every byte of a generation is there."""
        try:
            verify(self.inner, load_manifest(self.inner, self.run, published), "bytes", workers=1)
        except CachefsError:
            return False
        return True

    def check_quickly(self) -> None:
        """Check as `check` does that every version is there, without reading it: what is there does not change."""
        for entry in history(self.inner, self.keys, self.run):
            pins = self.promised[entry.published.attempt]
            whole = all(self.inner.head(pin.key, pin.version_id) for pin in pins)
            assert entry.retired or whole, f"{entry.published.generation} was lost"

    def check(self) -> None:
        """Check I14 and that no generation was lost that the pointer did not give away: every generation in the history
        that was never retired is whole, above all the one that is published.
        """
        for entry in history(self.inner, self.keys, self.run):
            assert entry.retired or self.readable(entry.published), f"{entry.published.generation} was lost"
        published = self.pointer.published
        assert published is None or self.readable(published)


def deletes(store: FaultyStore) -> int:
    """Return how many versions were asked to be deleted, but for leases."""
    return store.operations(lambda key: "/leases/" not in key).count("delete_version")


def hide(world: World, key: str) -> None:
    """Put a delete marker on a key, past the door of the store, which has none for it."""
    order = world.inner._next()
    world.inner._insert(key, _Version(order, f"v{order:06d}", world.now))
