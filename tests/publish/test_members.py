"""Several members: what is published is complete, what cannot be is abandoned with a name and a reason."""

from __future__ import annotations

import pytest
import trio

from cachefs.errors import DeniedError
from cachefs.formats.manifest import Shard
from cachefs.formats.pointer import Pointer
from cachefs.formats.records import State
from cachefs.publish import joined, joining
from cachefs.restore.reader import read_pointer, versions
from tests.conftest import DeclaredWarnings
from tests.publish.cluster import Cluster, Clusters, Node, records, shards
from tests.publish.stage import RUN, memory
from tests.store.faults import FaultyStore, Rule, ends, lost_request, refused, rules

A = {"a.bin": b"of member a, quite long"}
B = {"b.bin": b"of member b"}
C = {"c.bin": b"of member c"}


def newest(cluster: Cluster) -> tuple[Shard, ...]:
    """Return the shards of the newest published generation."""
    return next(iter(cluster.nodes.values())).manifest().shards


def pointers(cluster: Cluster) -> list[Pointer]:
    """Return the pointer's versions, newest first."""
    node = next(iter(cluster.nodes.values()))
    return [seen.pointer for seen in versions(cluster.store, node.keys, RUN)]


@pytest.mark.parametrize("marked", ["a", "b", "c"])
async def test_a_save_of_three_members(clusters: Clusters, marked: str) -> None:
    """The marker may appear on any of them."""
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        saves = cluster.save("step-1", 1, a=A, b=B, c=C)
        await trio.sleep(100)
        assert cluster.published() == []
        cluster.nodes[marked].mark(saves[marked])
        await cluster.until_state("step-1", State.PUBLISHED)
        assert cluster.published() == ["step-1"]
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b", "c.bin": "c"}
        for name, node in cluster.nodes.items():
            await cluster.until(lambda: not node.shards(saves[name]), "the local bytes are released")  # noqa: B023


async def test_members_without_files_say_so(clusters: Clusters) -> None:
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        saves = cluster.save("step-1", 1, a=A)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.PUBLISHED)
        assert shards(cluster) == {"a.bin": "a"}
        assert [entry.member for entry in cluster.nodes["a"].manifest().members] == ["a", "b", "c"]


@pytest.mark.parametrize("writers", ["b", "bc"])
async def test_a_save_in_which_the_owner_has_no_part(clusters: Clusters, writers: str) -> None:
    """Nobody but the owner opens attempts: the others ask for it."""
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        saves = cluster.save("step-1", 1, **{name: {name: b"bytes"} for name in writers})
        cluster.nodes["b"].mark(saves["b"])
        await cluster.until_state("step-1", State.PUBLISHED, "a", *writers)
        assert shards(cluster) == {name: name for name in writers}


async def test_asking_for_an_attempt_in_one_of_many_runs(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """Looks at other runs in between, and a store that refuses the first time, change nothing."""
    declared_warnings("a run does not move")
    asked = Rule("put", refused(DeniedError("not yet")), key=lambda key: "/wanted/" in key)
    async with clusters() as cluster:
        await cluster.start("a", "b")
        for number in range(3):
            cluster.nodes["a"].mark(cluster.nodes["a"].write("step-1", 1, A, run=f"exp/{number}"))
            await cluster.until_state("step-1", State.PUBLISHED)
        await cluster.nodes["b"].kill()
        store = FaultyStore(cluster.store, rules(asked))
        b = await cluster.add("b", owner=False, names=("a", "b"), count=2, store=store)
        b.mark(b.write("step-2", 2, B, run="exp/z"))
        await cluster.until_state("step-2", State.PUBLISHED, "a", "b")


async def test_an_owner_that_is_no_member(clusters: Clusters) -> None:
    """The promotion service: it alone may write the pointer."""
    async with clusters() as cluster:
        await cluster.add("promoter", owner=True, names=("b", "c"), count=2)
        for name in ("b", "c"):
            await cluster.add(name, owner=False, names=("b", "c"), count=2)
        saves = cluster.save("step-1", 1, b=B, c=C)
        cluster.nodes["c"].mark(saves["c"])
        await cluster.until_state("step-1", State.PUBLISHED, "b", "c")
        assert shards(cluster) == {"b.bin": "b", "c.bin": "c"}
        assert {pointer.owner.split("/")[0] for pointer in pointers(cluster)} == {"promoter"}


async def test_members_of_whom_only_the_number_is_known(clusters: Clusters) -> None:
    async with clusters() as cluster:
        await cluster.start("a", "b", "c", count=3)
        saves = cluster.save("step-1", 1, a=A, b=B)
        cluster.nodes["b"].mark(saves["b"])
        await cluster.until_state("step-1", State.PUBLISHED)
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b"}


async def test_an_owner_that_dies_before_it_has_said_why(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """The attempt is abandoned in its journal and still on the list: started again, it has nothing else to do there."""
    declared_warnings("a run does not move")
    declared_warnings("generation abandoned")
    store = FaultyStore(memory(), rules(Rule("put", lost_request, key=ends("abandoned.json"), nth=0)))
    async with clusters(store) as c:
        await c.start("a", "b")
        saves = c.save("step-1", 1, a={"same": b"one"}, b={"same": b"two"})
        c.nodes["a"].mark(saves["a"])
        await c.until_state("step-1", State.ABANDONED, "a")
        await trio.sleep(50)
        assert c.nodes["b"].latest("step-1").state is State.FLUSHED
        store.plan = rules()
        await c.restart("a")
        await c.until_state("step-1", State.ABANDONED, "b")
        assert "different bytes" in c.nodes["b"].latest("step-1").error


async def test_a_missing_member(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    """It is named, on every member; the pointer stays; the next save is published without the operator."""
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        saves = cluster.save("step-1", 1, a=A, b=B, c=C)
        await cluster.nodes["c"].kill()
        gone = cluster.nodes.pop("c")
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.ABANDONED)
        for node in cluster.nodes.values():
            assert "reports of c for 600 s: a member is missing" in node.latest("step-1").error
        assert cluster.published() == []
        cluster.nodes["c"] = await cluster.add("c", owner=False, names=("a", "b", "c"), count=3)
        saves = cluster.save("step-2", 2, a=A, b=B, c=C)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-2", State.PUBLISHED)
        assert cluster.published() == ["step-2"]
        assert gone.closed


async def test_a_member_that_asks_for_a_save_that_the_others_have_given_up(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """It was away when the attempt was open, and has a marker of its own: its part alone is no generation, and may not
    meet what the others save next under the name.
    """
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        await cluster.nodes["c"].kill()
        away = cluster.nodes.pop("c")
        saves = cluster.save("step-1", 1, a=A, b=B)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.ABANDONED)
        c = Node(cluster.root, cluster.store, name="c")
        c.settings, c.started = away.settings, away.started
        c.mark(c.write("step-1", 1, C))
        cluster.nodes["c"] = c
        await cluster.nursery.start(c.live)
        await cluster.until_state("step-1", State.ABANDONED)
        assert c.latest("step-1").error == joining.MISSED
        assert not cluster.store.list(c.keys.wanted(RUN)).keys
        assert cluster.published() == []


async def test_different_bytes_in_one_path(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        await cluster.start("a", "b")
        saves = cluster.save("step-1", 1, a={"same": b"one"}, b={"same": b"two"})
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.ABANDONED)
        for node in cluster.nodes.values():
            assert "members a and b have different bytes in same" in node.latest("step-1").error
        assert cluster.published() == []


async def test_a_member_whose_save_was_abandoned(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    """At once, and not after the deadline."""
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        await cluster.start("a", "b")
        saves = cluster.save("step-1", 1, a=A, b=B)
        b = cluster.nodes["b"]
        await cluster.until(lambda: b.latest("step-1").shared, "b has joined")
        b.journal.write_now(lambda txn: txn.update_attempt(saves["b"], state=State.ABANDONED, error="disk failed"))
        cluster.nodes["a"].mark(saves["a"])
        with trio.fail_after(300):
            await cluster.until_state("step-1", State.ABANDONED)
        assert (
            "member b cannot take part: its save was abandoned: disk failed"
            in cluster.nodes["a"].latest("step-1").error
        )


async def test_the_same_generation_again(clusters: Clusters) -> None:
    """Training that resumed writes a step a second time: the second save is another attempt on all members."""
    async with clusters() as cluster:
        await cluster.start("a", "b")
        for data in (b"first", b"second"):
            saves = cluster.save("step-1", 1, a={"a": data}, b={"b": data})
            cluster.nodes["b"].mark(saves["b"])
            await cluster.until_state("step-1", State.PUBLISHED)
            read = {shard.paths[0]: cluster.store.get(shard.pin.key, shard.pin.version_id) for shard in newest(cluster)}
            assert {path: found[1] for path, found in read.items() if found} == {"a": data, "b": data}


async def test_two_saves_between_two_looks(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    """Which of them belongs to which attempt cannot be told: neither is published, and a later one is."""
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")
    async with clusters() as cluster:
        await cluster.start("a", "b")
        for _ in range(2):
            saves = cluster.save("step-1", 1, a=A, b=B)
            for name, attempt in saves.items():
                cluster.nodes[name].mark(attempt)
        await cluster.until_state("step-1", State.ABANDONED)
        assert "cannot be told" in cluster.nodes["a"].latest("step-1").error
        assert cluster.published() == []
        saves = cluster.save("step-2", 2, a=A, b=B)
        cluster.nodes["b"].mark(saves["b"])
        await cluster.until_state("step-2", State.PUBLISHED)


# owners that come and go


async def test_a_new_owner_finishes_what_the_old_one_left(clusters: Clusters) -> None:
    """On another node, with nothing on its disk: all members have reported, so the attempt is complete."""
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        saves = cluster.save("step-1", 1, a=A, b=B, c=C)
        cluster.nodes["b"].mark(saves["b"])
        keys = cluster.nodes["a"].keys
        reports = keys.members("exp/a", saves["a"])
        await cluster.until(lambda: len(cluster.store.list(reports).keys) >= 2, "two have reported")
        await cluster.nodes["a"].kill()
        a = cluster.nodes.pop("a")
        assert cluster.published() == []
        if len(cluster.store.list(reports).keys) < 3:
            cluster.nodes["a"] = await cluster.add("a", owner=False, names=("a", "b", "c"), count=3)
        await cluster.add("d", owner=True, names=("b", "c", "d"), count=3)
        await cluster.until_state("step-1", State.PUBLISHED, "b", "c", "d")
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b", "c.bin": "c"}
        assert a.closed


async def test_an_owner_that_starts_again(clusters: Clusters) -> None:
    async with clusters() as cluster:
        await cluster.start("a", "b")
        saves = cluster.save("step-1", 1, a=A, b=B)
        for state in (State.FLUSHED, State.SEALED, State.TESTED):
            cluster.nodes["b"].mark(saves["b"])
            a = cluster.nodes["a"]
            await cluster.until(lambda: a.latest("step-1").state.rank >= state.rank, state.value)  # noqa: B023
            await cluster.restart("a")
        await cluster.until_state("step-1", State.PUBLISHED)
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b"}


async def test_an_owner_that_was_a_member_for_a_while_ends_what_it_gave_up_meanwhile(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """It had opened the attempt, and lost its part of it while another daemon owned the run."""
    declared_warnings("generation abandoned", optional=True)
    async with clusters() as cluster:
        await cluster.start("a", "b", "c")
        saves = cluster.save("step-1", 1, a=A, b=B, c=C)
        await cluster.until(lambda: cluster.nodes["c"].latest("step-1").shared, "opened")
        a = await cluster.restart("a", owner=False)
        await cluster.until(lambda: a.latest("step-1").shared == saves["a"], "its own attempt is joined")
        a.journal.write_now(lambda txn: joined.abandon(a.latest("step-1"), "lost in a power cut", txn))
        await cluster.restart("a", owner=True)
        await cluster.until_state("step-1", State.ABANDONED)
        seen = read_pointer(cluster.store, a.keys, RUN)
        assert seen is not None
        assert not seen.pointer.open
        assert "lost in a power cut" in cluster.nodes["c"].latest("step-1").error


async def test_wishes_are_granted_once_by_whatever_owner(clusters: Clusters) -> None:
    """A member asked while the owner was away, which then opened its own save. An owner that starts again finds the
    wish of a save that is published since, or was, and opens nothing for it.
    """
    async with clusters() as cluster:
        await cluster.start("a", "b")
        dead = cluster.nodes["a"]
        await dead.kill()
        cluster.nodes["b"].write("step-1", 1, B)
        wanted = cluster.nodes["b"].keys.wanted(RUN)
        await cluster.until(lambda: cluster.store.list(wanted).keys, "b has asked")
        a = cluster.nodes["a"] = Node(cluster.root, cluster.store, name="a")
        a.settings = dead.settings
        attempt = a.write("step-1", 1, A)
        await cluster.nursery.start(a.live)
        await cluster.until(lambda: cluster.nodes["b"].latest("step-1").shared == attempt, "b has joined a's save")
        a.mark(attempt)
        await cluster.until_state("step-1", State.PUBLISHED)
        before = len(pointers(cluster))
        a = await cluster.restart("a")
        saves = cluster.save("step-2", 2, a=A, b=B)
        a.mark(saves["a"])
        await cluster.until_state("step-2", State.PUBLISHED)
        await trio.sleep(100)
        await cluster.restart("a")
        await trio.sleep(100)
        assert [pointer.kind for pointer in pointers(cluster)[:-before]] == ["promote", "open", "grant"]


async def test_saves_are_published_in_their_order(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    """A member that was away reports many in a row and is interrupted after the first one: none is overtaken."""
    interrupted = [Rule("put", lost_request, key=ends("/members/b.json"), nth=nth) for nth in range(2, 10)]
    declared_warnings("a run does not move")
    async with clusters() as cluster:
        await cluster.add("a", owner=True, names=("a", "b"), count=2)
        store = FaultyStore(cluster.store, rules(*interrupted))
        away = await cluster.add("b", owner=False, names=("a", "b"), count=2, store=store)
        away.flushes = False
        for step in range(1, 21):
            saves = cluster.save(f"step-{step}", step, a=A, b=B)
            await cluster.until(lambda saves=saves: away.attempt(saves["b"]).shared, "b has joined")
            cluster.nodes["a"].mark(saves["a"])
            await cluster.until(lambda saves=saves: away.attempt(saves["b"]).closed_at, "closed")
        away.flushes = True
        await cluster.until_state("step-20", State.PUBLISHED)
        assert cluster.published() == [f"step-{step}" for step in range(1, 21)]


# members that come and go


async def test_a_member_that_starts_again_goes_on(clusters: Clusters) -> None:
    async with clusters() as cluster:
        await cluster.start("a", "b")
        saves = cluster.save("step-1", 1, a=A, b=B)
        await cluster.restart("b")
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.PUBLISHED)
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b"}


async def test_the_others_close_while_no_engine_runs(clusters: Clusters) -> None:
    """The engine of a member dies alone: what was written into its mount meanwhile is known to be this daemon's."""
    async with clusters() as cluster:
        await cluster.start("a", "b")
        saves = cluster.save("step-1", 1, a=A, b=B)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.PUBLISHED)
        dead = cluster.nodes["b"]
        await dead.kill()
        engine = cluster.nodes["b"] = Node(cluster.root, cluster.store, name="b")
        engine.settings, engine.started = dead.settings, dead.started
        saves = cluster.save("step-2", 2, a=A, b=B)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until(lambda: cluster.store.get(engine.keys.close("exp/a", saves["a"])), "closed")
        await cluster.nursery.start(engine.live)
        await cluster.until_state("step-2", State.PUBLISHED)
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b"}


async def test_a_member_that_lost_its_disk_after_the_close(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """It cannot know what was on it, and says so: nothing is published without its files."""
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")
    async with clusters() as cluster:
        await cluster.start("a", "b")
        b = cluster.nodes["b"]
        b.deaf = True
        saves = cluster.save("step-1", 1, a=A, b=B)
        cluster.nodes["a"].mark(saves["a"])
        closed = cluster.nodes["a"].keys.close("exp/a", saves["a"])
        await cluster.until(lambda: cluster.store.get(closed), "closed")
        await cluster.restart("b", lose_disk=True)
        await cluster.until_state("step-1", State.ABANDONED)
        assert "member b cannot take part: it was opened before" in cluster.nodes["a"].latest("step-1").error
        assert cluster.published() == []


async def test_a_member_that_lost_its_disk_before_the_close(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """It has its part written again, but cannot know whether the attempt was closed before: that save is lost, and the
    next one is published.
    """
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")
    async with clusters() as cluster:
        await cluster.start("a", "b")
        saves = cluster.save("step-1", 1, a=A, b=B)
        await cluster.until(lambda: cluster.nodes["b"].latest("step-1").shared, "joined")
        await cluster.restart("b", lose_disk=True)
        cluster.nodes["b"].write("step-1", 1, {"b.bin": b"again"})
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until(lambda: records(cluster.nodes["a"])[0].state is State.ABANDONED, "refused")
        assert cluster.published() == []
        saves = cluster.save("step-2", 2, a=A, b=B)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-2", State.PUBLISHED)
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b"}
        await cluster.until_state("step-1", State.ABANDONED)  # what was written again and never closed
        assert cluster.nodes["b"].latest("step-1").error == joining.MISSED
