"""An attempt that ends while its save is still written: what the members write of that name afterwards is not mixed."""

from __future__ import annotations

from cachefs.formats.records import State
from cachefs.publish import joining
from cachefs.publish.promotion import Identity
from cachefs.publish.rollback import rollback
from cachefs.publish.writes import Writes
from cachefs.restore.reader import locate, read_pointer
from cachefs.store.hop import Inline
from tests.conftest import DeclaredWarnings
from tests.publish.cluster import Cluster, Clusters, Node
from tests.publish.stage import RUN

NAMES = ("b", "c")


async def cut_short(cluster: Cluster) -> None:
    """Let b write its part of `last`, c not begin with it, and a rollback end the attempt."""
    await cluster.add("p", owner=True, service=True, names=NAMES, count=2)
    for name in NAMES:
        await cluster.add(name, owner=False, names=NAMES, count=2)
    b = cluster.nodes["b"]
    for step in (1, 2):
        saves = cluster.save(f"step-{step}", step, b={"b": b"x"}, c={"c": b"x"})
        b.mark(saves["b"])
        await cluster.until_state(f"step-{step}", State.PUBLISHED, *NAMES)
    b.write("last", 5, {"b": b"first"})
    await cluster.until(lambda: b.latest("last").shared, "joined")
    seen, target = locate(cluster.store, b.keys, RUN, "step-1")
    await rollback(Writes(cluster.store, b.keys, Inline()), RUN, seen, target, Identity("operator"))
    await cluster.until_state("last", State.ABANDONED, "b")
    ended = read_pointer(cluster.store, b.keys, RUN)
    assert ended is not None
    await cluster.until(lambda: all(looked(cluster.nodes[name]) >= ended.pointer.seq for name in NAMES), "all know")
    assert b.latest("last").closed_at is None


def looked(node: Node) -> int:
    """Return the pointer that a member saw at its last look."""
    with node.journal.read() as txn:
        run = txn.runs.get(RUN)
    return run.seq if run else 0


async def test_the_part_that_one_member_still_writes_does_not_meet_the_next_save_of_another(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")
    async with clusters() as cluster:
        await cut_short(cluster)
        c, away = cluster.nodes["c"], cluster.nodes.pop("b")
        await away.kill()  # its engine alone: it does not look, and the training goes on
        late = c.write("last", 5, {"c": b"first"})
        await cluster.until(lambda: c.latest("last").shared, "opened for c")
        c.mark(late)
        b = cluster.nodes["b"] = Node(cluster.root, cluster.store, name="b")
        b.settings, b.started = away.settings, away.started
        b.write("last", 5, {"b": b"second"})
        await cluster.nursery.start(b.live)
        await cluster.until(lambda: all(cluster.nodes[one].latest("last").state.final for one in NAMES), "ended")
        assert cluster.nodes["b"].latest("last").error == joining.CUT_SHORT
        assert joining.CUT_SHORT in c.latest("last").error
        assert cluster.published()[-1] == "step-1"
        saves = cluster.save("step-6", 6, b={"b": b"x"}, c={"c": b"x"})
        c.mark(saves["c"])
        await cluster.until_state("step-6", State.PUBLISHED, *NAMES)


async def test_what_is_written_again_on_all_members_is_published(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """The training starts again from an earlier step, on members of which some had a part and some had none."""
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        await cut_short(cluster)
        b, c = cluster.nodes["b"], cluster.nodes["c"]
        again = b.write("last", 5, {"b": b"second"})
        c.write("last", 5, {"c": b"second"})
        await cluster.until(lambda: all(node.latest("last").shared for node in (b, c)), "joined")
        b.mark(again)
        await cluster.until_state("last", State.PUBLISHED, *NAMES)
