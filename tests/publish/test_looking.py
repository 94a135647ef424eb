"""What one look does not let the others suffer for: unreadable objects, slow runs, many runs, jobs that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cachefs.errors import CorruptError
from cachefs.formats.codec import encode
from cachefs.formats.pointer import Pointer
from cachefs.formats.records import State
from cachefs.publish.joined import abandon
from cachefs.publish.lanes import MOST, RECENT, Lanes
from cachefs.publish.promotion import Identity
from cachefs.publish.rollback import rollback
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes
from cachefs.restore.reader import locate
from cachefs.store.base import CREATE_ONLY, ObjectInfo
from cachefs.store.hop import Inline
from tests.conftest import DeclaredWarnings
from tests.publish.cluster import Cluster, Clusters, Node, records
from tests.publish.stage import RUN, memory
from tests.store.faults import FaultyStore, Rule, refused, rules, throttled

A, B, C = {"a.bin": b"of a"}, {"b.bin": b"of b"}, {"c.bin": b"of c"}
NAMES = ("a", "b", "c")


async def publishes(cluster: Cluster, generation: str, step: int, **files: dict[str, bytes]) -> None:
    saves = cluster.save(generation, step, **files)
    first = next(iter(files))
    await cluster.until(lambda: all(cluster.nodes[name].latest(generation).opened_epoch for name in files), "opened")
    cluster.nodes[first].mark(saves[first])
    await cluster.until_state(generation, State.PUBLISHED, *files)


def shown(node: Node) -> str:
    return "; ".join(f"{one.run}: {one.error}" for one in node.problems.all())


# unreadable objects


@pytest.mark.parametrize("what", ["members/c.json", "close.json"])
async def test_an_unreadable_object_ends_its_attempt_alone(
    clusters: Clusters, declared_warnings: DeclaredWarnings, what: str
) -> None:
    """Of another format, as in the middle of an upgrade, or damaged. The next save is published."""
    declared_warnings("generation abandoned")
    declared_warnings("a run does not move", optional=True)
    async with clusters() as cluster:
        for name in NAMES:
            await cluster.add(name, owner=name == "a", names=NAMES, count=3)
        a, b = cluster.nodes["a"], cluster.nodes["b"]
        saves = cluster.save("step-1", 1, a=A, b=B, c=C)
        await cluster.until(lambda: b.latest("step-1").shared, "joined")
        cluster.store.put(f"{a.keys.attempt(RUN, saves['a'])}/{what}", b'{"format":2}', condition=CREATE_ONLY)
        a.mark(saves["a"])
        await cluster.until(lambda: all(records(one)[0].state.final for one in cluster.nodes.values()), "ended")
        for node in cluster.nodes.values():
            assert f"{what} is not a valid" in records(node)[0].error
        await publishes(cluster, "step-2", 2, a=A, b=B, c=C)
        assert cluster.published() == ["step-2"]


@pytest.mark.parametrize("what", ["members/b.json", "members/c.json", "manifest.json", "abandoned.json"])
async def test_an_object_of_which_the_store_gives_no_version_ends_its_attempt_alone(
    clusters: Clusters, declared_warnings: DeclaredWarnings, what: str
) -> None:
    """It was written while the bucket kept no versions, say: reading it is what fails."""
    declared_warnings("generation abandoned", optional=True)
    declared_warnings("a run does not move", optional=True)
    store = FaultyStore(memory())
    async with clusters(store) as cluster:
        for name in NAMES:
            await cluster.add(name, owner=name == "a", names=NAMES, count=3)
        saves = cluster.save("step-1", 1, a=A, b=B, c=C)
        bad = f"{cluster.nodes['a'].keys.attempt(RUN, saves['a'])}/{what}"
        store.plan = rules(Rule("get", refused(CorruptError("no version")), key=bad.__eq__, nth=0))
        if what == "abandoned.json":
            await cluster.until(lambda: cluster.nodes["b"].latest("step-1").shared, "joined")
            cluster.nodes["b"].journal.write_now(lambda txn: abandon(cluster.nodes["b"].latest("step-1"), "lost", txn))
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until(lambda: all(records(one)[0].state.final for one in cluster.nodes.values()), "ended")
        await publishes(cluster, "step-2", 2, a=A, b=B, c=C)
        assert cluster.published()[-1] == "step-2"


async def test_an_open_record_that_is_not_there_any_more_costs_the_save_that_waited_for_it(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """The attempt was opened and given up while the member was away, and its objects were collected since."""
    declared_warnings("generation abandoned")
    declared_warnings("a run does not move", optional=True)
    store = FaultyStore(memory())
    async with clusters(store) as cluster:
        for name in ("b", "c"):
            await cluster.add(name, owner=False, names=("b", "c"), count=2)
        saves = cluster.save("step-1", 1, b=B, c=C)
        for name, save in saves.items():
            cluster.nodes[name].mark(save)
        keys = cluster.nodes["b"].keys
        await cluster.until(lambda: store.list(keys.wanted(RUN)).keys, "asked")
        away = cluster.nodes.pop("b")
        await away.kill()
        await cluster.add("p", owner=True, service=True, names=("b", "c"), count=2)
        await cluster.until_state("step-1", State.ABANDONED, "c")
        await cluster.nodes.pop("p").kill()
        for key in store.list(keys.attempts(RUN)).keys:
            for version in store.list_versions(key):
                store.delete_version(key, version.version_id)
        b = cluster.nodes["b"] = Node(cluster.root, store, name="b")
        b.settings, b.started = away.settings, away.started
        await cluster.nursery.start(b.live)
        await cluster.until_state("step-1", State.ABANDONED, "b")


async def test_an_unreadable_open_record(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    """A member that cannot read it says so in its report, and takes part in the next save."""
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        other = FaultyStore(cluster.store)
        await cluster.add("a", owner=True, names=("a", "b"), count=2)
        await cluster.add("b", owner=False, names=("a", "b"), count=2, store=other)
        real = other.get

        def get(key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
            found = real(key, version_id)
            return (found[0], b'{"format":2}') if found and key.endswith(f"{first}/open.json") else found

        first = cluster.save("step-1", 1, a=A, b=B)["a"]
        other.get = get  # type: ignore[method-assign]
        cluster.nodes["a"].mark(first)
        await cluster.until_state("step-1", State.ABANDONED, "a")
        assert "member b cannot take part" in records(cluster.nodes["a"])[0].error
        assert "open.json is not a valid Open" in records(cluster.nodes["a"])[0].error
        await publishes(cluster, "step-2", 2, a=A, b=B)


@pytest.mark.parametrize("found", [None, b'{"format":2}'], ids=["gone", "unreadable"])
async def test_an_open_record_that_neither_the_next_owner_nor_a_new_member_can_read(
    clusters: Clusters, declared_warnings: DeclaredWarnings, found: bytes | None
) -> None:
    """Nobody can complete that attempt: the next owner takes it off the list, where it would keep the member out."""
    declared_warnings("generation abandoned")
    declared_warnings("a run does not move", optional=True)
    store = FaultyStore(memory())
    real = store.get
    async with clusters(store) as cluster:
        for name in ("a", "b"):
            await cluster.add(name, owner=name == "a", names=("a", "b"), count=2)
        await publishes(cluster, "step-1", 1, a=A, b=B)
        first = cluster.save("step-2", 2, a=A)["a"]
        await cluster.until(lambda: cluster.nodes["a"].latest("step-2").opened_epoch, "opened")
        for name in ("a", "b"):
            await cluster.nodes[name].kill()

        def get(key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
            answer = real(key, version_id)
            if answer is None or not key.endswith(f"{first}/open.json"):
                return answer
            return None if found is None else (answer[0], found)

        store.get = get  # type: ignore[method-assign]
        for name in ("a", "b"):
            (cluster.root / name).rename(cluster.root / f"{name}-lost")
            await cluster.add(name, owner=name == "a", names=("a", "b"), count=2)
        a, b = cluster.nodes.values()
        await cluster.until(lambda: records(a) and b.known(RUN).looked, "the new member may join")
        await cluster.until(lambda: not shown(a) + shown(b), "nothing is wrong any more")
        await publishes(cluster, "step-3", 3, a=A, b=B)
        assert cluster.published() == ["step-1", "step-3"]
        ended = a.latest("step-2")
        assert ended.state is State.ABANDONED
        assert "open.json" in ended.error


async def test_an_unreadable_wish_is_passed_and_shown(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("a run does not move")
    async with clusters() as cluster:
        await cluster.start(*NAMES)
        key = cluster.nodes["a"].keys.wanted(RUN, "f" * 32)
        cluster.store.put(key, b'{"format":2}', condition=CREATE_ONLY)
        await publishes(cluster, "step-1", 1, a=A, b=B, c=C)
        assert f"{key} is not a valid Wanted" in shown(cluster.nodes["a"])
        [version] = list(cluster.store.list_versions(key))
        cluster.store.delete_version(key, version.version_id)
        await cluster.until(lambda: not shown(cluster.nodes["a"]), "the problem is gone")


# who is missing, and since when


async def test_a_long_save_of_a_promotion_service_is_no_missing_member(clusters: Clusters) -> None:
    """The owner has no part in it: the deadline counts from the close on, as it does where the owner is a member."""
    async with clusters() as cluster:
        await cluster.add("p", owner=True, names=("a", "b"), count=2)
        for name in ("a", "b"):
            await cluster.add(name, owner=False, names=("a", "b"), count=2)
        saves = cluster.save("step-1", 1, a=A, b=B)
        await trio.sleep(3 * cluster.nodes["p"].settings.deadline)  # still being written
        cluster.nodes["a"].mark(saves["a"])
        await cluster.until_state("step-1", State.PUBLISHED)


async def test_a_promotion_service_names_who_is_missing(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    declared_warnings("generation abandoned")
    async with clusters() as cluster:
        await cluster.add("p", owner=True, names=("a", "b"), count=2)
        for name in ("a", "b"):
            await cluster.add(name, owner=False, names=("a", "b"), count=2)
        saves = cluster.save("step-1", 1, a=A, b=B)
        await cluster.until(lambda: cluster.nodes["b"].latest("step-1").shared, "joined")
        await cluster.nodes["b"].kill()
        cluster.nodes["a"].mark(saves["a"])
        # The first record: a wish of b's, if it had asked as well, is granted afterwards and waits for it.
        ends = [cluster.nodes[name] for name in "pa"]
        await cluster.until(lambda: all(records(one)[0].state is State.ABANDONED for one in ends), "abandoned")
        for one in ends:
            assert "waits for the reports of b for 600 s" in records(one)[0].error


async def test_a_job_on_other_nodes_is_not_held_up(clusters: Clusters, declared_warnings: DeclaredWarnings) -> None:
    """What the first job has left half written declares its own members. It ends when one of the new job refuses it,
    which has written it again.
    """
    declared_warnings("generation abandoned")
    declared_warnings("cannot take part")
    async with clusters() as cluster:
        await cluster.start("a", "b")
        await publishes(cluster, "step-1", 1, a=A, b=B)
        cluster.save("step-2", 2, a=A, b=B)
        await cluster.until(lambda: cluster.nodes["b"].latest("step-2").shared, "joined")
        for name in ("a", "b"):
            await cluster.nodes.pop(name).kill()
        began = trio.current_time()
        await cluster.start("d", "e")
        for step in (2, 3):
            saves = cluster.save(f"step-{step}", step, d=A, e=B)
            await cluster.until(lambda: cluster.nodes["e"].latest(f"step-{step}").shared, "joined")  # noqa: B023
            cluster.nodes["d"].mark(saves["d"])
            await cluster.until_state(f"step-{step}", State.PUBLISHED, "e")
        await cluster.until(lambda: all(one.state.final for one in records(cluster.nodes["d"])), "the old one ends")
        assert trio.current_time() - began < cluster.nodes["d"].settings.deadline
        assert cluster.published() == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("owner", ["a", "p"])
async def test_a_rollback_ends_what_is_open_at_once(
    clusters: Clusters, declared_warnings: DeclaredWarnings, owner: str
) -> None:
    """On the owner as well, which may be no member; everybody is told."""
    declared_warnings("generation abandoned")
    if owner == "p":  # the wish of the other member may come afterwards
        declared_warnings("cannot take part", optional=True)
    async with clusters() as cluster:
        for name in sorted({owner, "a", "b"}):
            await cluster.add(name, owner=name == owner, names=("a", "b"), count=2)
        for step in (1, 2):
            await publishes(cluster, f"step-{step}", step, a=A, b=B)
        cluster.save("step-3", 3, a=A, b=B)
        await cluster.until(lambda: all(cluster.nodes[name].latest("step-3").opened_epoch for name in "ab"), "joined")
        began = trio.current_time()
        keys = cluster.nodes["a"].keys
        seen, target = locate(cluster.store, keys, RUN, "step-1")
        await rollback(Writes(cluster.store, keys, Inline()), RUN, seen, target, Identity("operator"))
        await cluster.until_state("step-3", State.ABANDONED)
        assert trio.current_time() - began < 30
        for name in {owner, "a", "b"}:
            [ended] = [one for one in records(cluster.nodes[name]) if "ended by the rollback to step-1" in one.error]
            assert ended.generation == "step-3"
        await publishes(cluster, "step-4", 4, a=A, b=B)


# many runs


async def test_a_run_that_waits_for_the_store_holds_up_no_other(
    clusters: Clusters, declared_warnings: DeclaredWarnings
) -> None:
    """And it says what it waits for."""
    declared_warnings("a run does not move")
    async with clusters() as cluster:
        slow = FaultyStore(
            cluster.store, lambda call: throttled if call.operation == "put" and f"{RUN}/attempts" in call.key else None
        )
        await cluster.add("a", owner=True, names=("a", "b"), count=2)
        await cluster.add("b", owner=False, names=("a", "b"), count=2, store=slow)
        cluster.nodes["a"].mark(cluster.save("step-1", 1, a=A, b=B)["a"])
        await cluster.until(lambda: "SlowDown" in shown(cluster.nodes["b"]), "shown")
        other = {name: cluster.nodes[name].write("step-9", 9, B, run="zzz/other") for name in ("a", "b")}
        await cluster.until(lambda: cluster.nodes["b"].latest("step-9").shared, "joined")
        cluster.nodes["a"].mark(other["a"])
        await cluster.until_state("step-9", State.PUBLISHED)
        assert not cluster.nodes["b"].latest("step-1").state.final
        slow.plan = lambda call: None
        await cluster.until_state("step-1", State.PUBLISHED)
        await cluster.until(lambda: not shown(cluster.nodes["b"]), "the problem is gone")


@pytest.mark.parametrize("runs", [0, 350])
async def test_finished_runs_cost_no_time(tmp_path: Path, runs: int) -> None:
    """A member that writes no file learns of a save from the pointer; every setting is the default."""
    store = memory()
    async with trio.open_nursery() as nursery:
        cluster = Cluster(tmp_path, store, nursery)
        for name in ("a", "b"):
            node = Node(tmp_path, store, name=name)
            node.settings = Settings(member=name, owner=name == "a", names=("a", "b"), count=2)
            cluster.nodes[name] = node
        for number in range(runs):
            run = f"old/{number:04d}"
            pointer = Pointer(
                run=run, kind="grant", seq=1, epoch=1, owner="x/y/z", nonce=f"{number}", at="2026-01-01T00:00:00Z"
            )
            store.put(node.keys.pointer(run), encode(pointer), condition=CREATE_ONLY)
        for node in cluster.nodes.values():
            await nursery.start(node.live)
        took = []
        for step in range(3):
            saves = cluster.save(f"step-{step}", step, a=A)
            await cluster.until(lambda: cluster.nodes["a"].latest(f"step-{step}").opened_epoch, "opened")  # noqa: B023
            cluster.nodes["a"].mark(saves["a"])
            began = trio.current_time()
            await cluster.until_state(f"step-{step}", State.PUBLISHED, "a")
            took.append(trio.current_time() - began)
            await trio.sleep(600)
        nursery.cancel_scope.cancel()
    for node in cluster.nodes.values():
        node.close()
    assert max(took) < 120, took  # the first: until the next search for runs


def test_recent_runs_come_every_round_and_the_others_in_turn() -> None:
    lanes = Lanes()
    for number in range(5):
        assert lanes.add(f"old-{number}")
        lanes.looked(f"old-{number}", 7, now=0.0, age=RECENT)
    assert not lanes.add("old-0")
    lanes.looked("new", 1, now=0.0, age=10.0)
    rounds = [lanes.due(now) for now in range(5)]
    assert all(len(one) == 2 and "new" in one for one in rounds)
    assert set.union(*rounds) == lanes.known()
    lanes.looked("old-3", 8, now=5.0, age=RECENT)  # its pointer has moved
    assert all({"new", "old-3"} < lanes.due(6.0) for _ in range(5))
    assert lanes.due(RECENT - 10.0) & {"new", "old-3"} == {"old-3"} | (lanes.due(RECENT - 10.0) & {"new"})


def test_so_many_recent_runs_and_no_more() -> None:
    lanes = Lanes()
    for number in range(100):
        lanes.looked(f"run-{number:02d}", 1, now=0.0, age=float(number))
    recent = {f"run-{number:02d}" for number in range(MOST)}
    rounds = [lanes.due(1.0) for _ in range(100 - MOST)]
    assert all(recent < one and len(one) == MOST + 1 for one in rounds)
    assert set.union(*rounds) == lanes.known()
