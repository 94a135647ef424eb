"""Members ask the owner for attempts: no more often than needed, and again when the wish was collected."""

from __future__ import annotations

import trio

from cachefs.formats.records import State
from cachefs.publish.writes import Writes
from cachefs.retention.executor import Collector
from cachefs.retention.plan import Policy
from cachefs.store.hop import Inline
from tests.publish.cluster import Clusters
from tests.publish.stage import RUN, memory
from tests.store.faults import FaultyStore

NAMES = ("a", "b", "c")


async def test_the_first_member_asks_for_all(clusters: Clusters) -> None:
    async with clusters() as cluster:
        await cluster.add("p", owner=True, service=True, names=NAMES, count=3)
        for name in NAMES:
            await cluster.add(name, owner=False, names=NAMES, count=3)
        keys = cluster.nodes["a"].keys
        for step in (1, 2):  # before the first one the owner has not heard of the run, and that takes longer
            before = len(cluster.store.list(keys.wanted(RUN)).keys)
            saves = cluster.save(f"step-{step}", step, **{name: {name: b"x"} for name in NAMES})
            cluster.nodes["c"].mark(saves["c"])
            await cluster.until_state(f"step-{step}", State.PUBLISHED)
        wishes = cluster.store.list(keys.wanted(RUN)).keys
        assert len(wishes) == before + 1
        assert keys.wanted(RUN, saves["a"]) in wishes


async def test_a_wish_that_was_collected_is_wished_again(clusters: Clusters) -> None:
    """The owner was away for longer than the grace of the garbage collection."""
    async with clusters() as cluster:
        for name in NAMES:
            await cluster.add(name, owner=False, names=NAMES, count=3)
        await cluster.add("p", owner=True, service=True, names=NAMES, count=3)
        saves = cluster.save("step-1", 1, **{name: {name: b"x"} for name in NAMES})
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.PUBLISHED)
        await cluster.nodes.pop("p").kill()
        saves = cluster.save("step-2", 2, **{name: {name: b"x"} for name in NAMES})
        cluster.nodes["a"].mark(saves["a"])
        keys = cluster.nodes["a"].keys
        await cluster.until(lambda: len(cluster.store.list(keys.wanted(RUN)).keys) > 3, "all have asked")
        await Collector(Writes(cluster.store, keys, Inline()), Policy(grace=0.0)).collect(RUN)
        assert not cluster.store.list(keys.wanted(RUN)).keys
        await cluster.add("p", owner=True, service=True, names=NAMES, count=3)
        await cluster.until_state("step-2", State.PUBLISHED)


async def test_members_that_wait_read_no_history(clusters: Clusters) -> None:
    """However long it is: whether an attempt was opened, and has ended unseen, one object says."""
    store = FaultyStore(memory())
    async with clusters(store) as cluster:
        await cluster.start(*NAMES)
        for step in (1, 2, 3):
            saves = cluster.save(f"step-{step}", step, **{name: {name: b"x"} for name in NAMES})
            cluster.nodes["a"].mark(saves["a"])
            await cluster.until_state(f"step-{step}", State.PUBLISHED)
        await cluster.nodes.pop("a").kill()
        await trio.sleep(60)
        store.calls.clear()
        cluster.save("step-4", 4, b={"b": b"x"}, c={"c": b"x"})
        await trio.sleep(60)
        assert not [call for call in store.calls if call.version_id and call.key.endswith("pointer.json")]
        assert [call for call in store.calls if call.key.endswith("open.json")]
