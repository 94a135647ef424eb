"""A save that was cut short and is written once more by a training that started again: it is published."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from cachefs.formats.records import State
from cachefs.generations import attempts
from cachefs.publish import joined
from tests.conftest import DeclaredWarnings
from tests.publish.cluster import Cluster, Clusters, Node


async def publish(cluster: Cluster, generation: str, step: int, names: str) -> None:
    """Let the named nodes write a save, the first one its marker; it must be published."""
    saves = cluster.save(generation, step, **{name: {name: b"%d" % step} for name in names})
    await trio.sleep(60)
    cluster.nodes[names[0]].mark(saves[names[0]])
    await cluster.until_state(generation, State.PUBLISHED, *names)


def knows_of(node: Node) -> list[str]:
    """Return the attempts of others that a node takes to be under way."""
    with node.journal.read() as txn:
        return [record.attempt for record in txn.shared.scan()]


@pytest.mark.parametrize("heard", [True, False], ids=["all know", "others know"])
@pytest.mark.parametrize("lost", ["a", "b", "c"])
async def test_a_machine_was_replaced(
    clusters: Clusters, declared_warnings: DeclaredWarnings, lost: str, heard: bool
) -> None:
    """The other daemons live on, and know a save that the new one does not. What the new machine writes is no part of
    an attempt that is older than its mount, whenever it hears that this one has ended.
    """
    declared_warnings("generation abandoned", optional=True)
    declared_warnings("cannot take part", optional=True)
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        await publish(cluster, "last", 1, "abc")
        cluster.save("last", 2, **{name: {name: b"cut short"} for name in "abc"})
        others = [name for name in "abc" if name != lost]
        await cluster.until(lambda: all(cluster.nodes[one].latest("last").opened_epoch for one in others), "opened")
        new = await cluster.restart(lost, lose_disk=True)
        await cluster.until_state("last", State.ABANDONED, *others)
        if heard:
            await cluster.until(lambda: not knows_of(new), "the new machine knows that the attempt has ended")
        for step in (2, 3):
            await publish(cluster, "last", step, "abc")


@pytest.mark.parametrize("skew", [0, 2, 10])
async def test_the_whole_job_was_started_again(
    clusters: Clusters, declared_warnings: DeclaredWarnings, skew: float
) -> None:
    """Members begin `skew` seconds one after the other: the first change in the save of before ends it."""
    declared_warnings("generation abandoned", optional=True)
    declared_warnings("cannot take part", optional=True)
    async with clusters() as cluster:
        await cluster.start("a", "b")
        first = cluster.save("last", 1, a={"a": b"cut short"}, b={"b": b"cut short"})
        await cluster.until(lambda: cluster.nodes["b"].latest("last").shared, "joined")
        for name in "ab":
            await cluster.restart(name)
        await trio.sleep(30)
        second: dict[str, str] = {}
        for name, save in first.items():
            node = cluster.nodes[name]
            node.journal.write_now(partial(attempts.ended, attempt=save, reason="superseded"))
            second[name] = node.write("last", 1, {name: b"whole"})
            await trio.sleep(skew)
        await trio.sleep(20)
        cluster.nodes["a"].mark(second["a"])
        await cluster.until_state("last", State.PUBLISHED, "a", "b")


async def test_one_member_lost_its_part_of_a_save_that_others_saw_complete(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """A bad block costs the save that holds it, and none after it."""
    declared_warnings("generation abandoned", optional=True)
    async with clusters() as cluster:
        await cluster.start("a", "b")
        b = cluster.nodes["b"]
        saves = cluster.save("last", 1, a={"a": b"1"}, b={"b": b"1"})
        await cluster.until(lambda: b.latest("last").shared, "joined")
        cluster.nodes["a"].mark(saves["a"])
        b.journal.write_now(lambda txn: joined.abandon(b.latest("last"), "a file of it cannot be read", txn))
        await cluster.until_state("last", State.ABANDONED, "a", "b")
        await cluster.until(lambda: not knows_of(b), "b knows that the attempt has ended")
        for step in (2, 3):
            await publish(cluster, "last", step, "ab")
