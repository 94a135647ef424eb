"""Members and owners that are configured differently: nothing is published without the files of a member."""

from __future__ import annotations

import msgspec
import pytest
import trio

from cachefs.formats.records import State
from tests.conftest import DeclaredWarnings
from tests.publish.cluster import Clusters, Node, records, shards

NAMES = ("a", "b")
A = {"a.bin": b"of member a"}
B = {"b.bin": b"of member b"}


@pytest.fixture
def warned(declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")


@pytest.mark.usefixtures("warned")
async def test_an_owner_of_a_number_and_members_with_names(clusters: Clusters) -> None:
    """Whoever is counted might be none of them: the members refuse, and say what differs."""
    async with clusters() as cluster:
        await cluster.add("p", owner=True, names=(), count=2)
        for name in NAMES:
            await cluster.add(name, owner=False, names=NAMES, count=2)
        cluster.nodes["b"].flushes = False
        saves = cluster.save("step-1", 1, a=A, b=B)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.ABANDONED)
        # The first to look refuses and ends it; the other one may have missed it then.
        errors = [cluster.nodes[name].latest("step-1").error for name in NAMES]
        differs = "configured for 2 members: a, b, and the owner of the attempt for 2 members, whose names"
        assert any(differs in error for error in errors), errors
        assert cluster.published() == []


async def test_a_service_of_a_number_of_members_is_not_counted(clusters: Clusters) -> None:
    async with clusters() as cluster:
        await cluster.add("p", owner=True, service=True, names=(), count=2)
        for name in NAMES:
            await cluster.add(name, owner=False, names=(), count=2)
        cluster.nodes["b"].flushes = False
        saves = cluster.save("step-1", 1, a=A, b=B)
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until(lambda: cluster.nodes["a"].latest("step-1").report, "a has reported")
        await trio.sleep(100)
        assert cluster.published() == []
        cluster.nodes["b"].flushes = True
        await cluster.until_state("step-1", State.PUBLISHED, *NAMES)
        assert shards(cluster) == {"a.bin": "a", "b.bin": "b"}


async def test_what_was_published_without_a_members_files_is_not_published_for_it(clusters: Clusters) -> None:
    """An owner that is no member, and is not told so, is counted in the place of one that is slow (I19)."""
    async with clusters() as cluster:
        await cluster.add("p", owner=True, names=(), count=2)
        a = await cluster.add("a", owner=False, names=(), count=2)
        marked = a.write("step-1", 1, A)
        await cluster.until(lambda: a.latest("step-1").shared, "a has joined")
        b = Node(cluster.root, cluster.store, name="b")
        b.settings, b.flushes = msgspec.structs.replace(a.settings, member="b"), False
        slow = b.write("step-1", 1, B)
        cluster.nodes["b"] = b
        await cluster.nursery.start(b.live)
        await cluster.until(lambda: b.latest("step-1").shared, "b has joined")
        a.mark(marked)
        await cluster.until_state("step-1", State.PUBLISHED, "a")
        await cluster.until_state("step-1", State.ABANDONED, "b")
        assert "was published without the files of this member, b" in b.latest("step-1").error
        assert b.shards(slow), "its bytes are kept"


@pytest.mark.usefixtures("warned")
async def test_a_member_that_the_owner_does_not_know(clusters: Clusters) -> None:
    """It has files of the save: they would be missing."""
    async with clusters() as cluster:
        await cluster.start(*NAMES)
        await cluster.add("d", owner=False, names=("a", "b", "d"), count=3)
        saves = cluster.save("step-1", 1, a=A, b=B, d={"d.bin": b"of d"})
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.ABANDONED)
        refused = "d is configured for 3 members: a, b, d, and the owner"
        for name in ("a", "d"):
            assert any(refused in record.error for record in records(cluster.nodes[name]))
        assert cluster.published() == []


async def test_a_service_publishes_nothing_of_its_own(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        p = await cluster.add("p", owner=True, service=True, names=NAMES, count=2)
        p.mark(p.write("step-1", 1, A))
        await cluster.until_state("step-1", State.ABANDONED, "p")
        assert "is none of them" in p.latest("step-1").error


async def test_a_file_of_one_member_is_no_business_of_others(clusters: Clusters) -> None:
    async with clusters() as cluster:
        await cluster.start(*NAMES)
        await cluster.add("d", owner=False, names=("a", "b", "d"), count=3)
        a, d = cluster.nodes["a"], cluster.nodes["d"]
        a.mark(a.write("a.pt", 1, {"a.pt": b"of a"}, kind="file"))
        d.mark(d.write("d.pt", 2, {"d.pt": b"of d"}, kind="file"))
        await cluster.until_state("a.pt", State.PUBLISHED, "a")
        await cluster.until_state("d.pt", State.PUBLISHED, "d")
