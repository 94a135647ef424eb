"""A training that starts again while the owner is away, and writes names again: no mixture of the two is published."""

from __future__ import annotations

import pytest
import trio

from cachefs.formats.records import State
from cachefs.publish.steps import update
from tests.conftest import DeclaredWarnings
from tests.publish.cluster import Cluster, Clusters, Node
from tests.publish.stage import RUN

NAMES = ("a", "b")


async def serve(cluster: Cluster) -> None:
    """Start the promotion service."""
    await cluster.add("p", owner=True, service=True, names=NAMES, count=2)


async def crashed(cluster: Cluster, *, superseded: bool = True) -> None:
    """Let the first life of the training write step-2, closed on a alone, while nobody owns the run; then start the
    nodes again. b's part is over as soon as it is written again.
    """
    for name in NAMES:
        await cluster.add(name, owner=False, names=NAMES, count=2)
    saves = write(cluster, b"first")
    cluster.nodes["a"].mark(saves["a"])
    wanted = cluster.nodes["a"].keys.wanted(RUN)
    await cluster.until(lambda: cluster.store.list(wanted).keys, "asked")
    for name in NAMES:
        await cluster.restart(name)
    if superseded:
        over = {"state": State.ABANDONED, "error": "superseded: written again after a restart"}
        cluster.nodes["b"].journal.write_now(lambda txn: update(txn, saves["b"], **over))


def write(cluster: Cluster, data: bytes, *names: str) -> dict[str, str]:
    return cluster.save("step-2", 2, **{name: {name: data} for name in names or NAMES})


def published(cluster: Cluster) -> dict[str, bytes]:
    found = {}
    for shard in cluster.nodes["a"].manifest().shards:
        read = cluster.store.get(shard.pin.key, shard.pin.version_id)
        assert read is not None
        found[shard.paths[0]] = read[1]
    return found


@pytest.mark.parametrize("superseded", [True, False])
async def test_the_second_time_is_published_whole(clusters: Clusters, superseded: bool) -> None:
    """Both have given up what they wrote first, whether it was closed or not, before the owner is there."""
    async with clusters() as cluster:
        await crashed(cluster, superseded=superseded)
        saves = write(cluster, b"second")
        cluster.nodes["a"].mark(saves["a"])
        await trio.sleep(60)
        await serve(cluster)
        await cluster.until_state("step-2", State.PUBLISHED)
        assert published(cluster) == {"a": b"second", "b": b"second"}
        await trio.sleep(100)
        assert cluster.published() == ["step-2"], "the wish for the first one is over"


async def test_an_attempt_for_the_first_time_is_no_place_for_the_second(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """The owner opens an attempt for what a closed in the first life, when b has begun the second and a has not."""
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")
    async with clusters() as cluster:
        await crashed(cluster)
        away = cluster.nodes.pop("b")
        await away.kill()
        await serve(cluster)
        await cluster.until(lambda: cluster.nodes["a"].latest("step-2").shared, "a has joined")
        b = cluster.nodes["b"] = Node(cluster.root, cluster.store, name="b")
        b.settings, b.started = away.settings, away.started
        write(cluster, b"second", "b")
        await cluster.nursery.start(b.live)
        await cluster.until_state("step-2", State.ABANDONED)
        assert "member b cannot take part" in cluster.nodes["a"].latest("step-2").error
        assert cluster.published() == []
        saves = cluster.save("step-3", 3, a={"a": b"x"}, b={"b": b"x"})
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-3", State.PUBLISHED)


async def test_an_attempt_for_the_second_time_waits_for_it(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """b has asked for its part of the first one, and begins the second after the owner has opened an attempt for it.
    What it had asked for is refused in the end.
    """
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")
    async with clusters() as cluster:
        await crashed(cluster, superseded=False)
        first = write(cluster, b"second", "a")
        await trio.sleep(20)
        await serve(cluster)
        await cluster.until(lambda: cluster.nodes["a"].latest("step-2").shared, "a has joined")
        await cluster.until(lambda: cluster.nodes["b"].latest("step-2").state is State.ABANDONED, "the first is over")
        write(cluster, b"second", "b")
        cluster.nodes["a"].mark(first["a"])
        await cluster.until_state("step-2", State.PUBLISHED, *NAMES)
        assert published(cluster) == {"a": b"second", "b": b"second"}
        await cluster.until_state("step-2", State.ABANDONED, "p")
        assert cluster.published() == ["step-2"]


async def test_what_waited_for_the_owner_is_published_after_a_restart(clusters: Clusters) -> None:
    """The training did not write it again."""
    async with clusters() as cluster:
        await crashed(cluster, superseded=False)
        await serve(cluster)
        await cluster.until_state("step-2", State.PUBLISHED)
        assert published(cluster) == {"a": b"first", "b": b"first"}


@pytest.mark.parametrize("base", range(1, 5))
async def test_saves_that_waited_are_opened_in_the_order_of_their_steps(clusters: Clusters, base: int) -> None:
    """Otherwise the older one would be refused for its step, though it is whole."""
    async with clusters() as cluster:
        for name in NAMES:
            await cluster.add(name, owner=False, names=NAMES, count=2)
        for step in (base, base + 1):
            saves = cluster.save(f"step-{step}", step, a={"a": b"x"}, b={"b": b"x"})
            cluster.nodes["a"].mark(saves["a"])
            await trio.sleep(30)
        await serve(cluster)
        await cluster.until_state(f"step-{base + 1}", State.PUBLISHED)
        assert cluster.published() == [f"step-{base}", f"step-{base + 1}"]
