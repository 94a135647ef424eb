"""Several members of one run: three daemons with a mount and a disk each, one bucket behind the fault proxy.

Every file of a save is on one member's mount only, as with node-local disks. What the pointer names is read back with
boto3 alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from integration.node import Node, await_condition
from integration.proxy import Hold
from integration.world import (
    QUICK,
    World,
    assert_same,
    assert_written_once,
    attempts,
    await_state,
    build,
    history,
    index,
    states,
    tensors,
    write,
)
from tests.servers import Server

pytestmark = [pytest.mark.mount, pytest.mark.server]

MARKER = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def shared(moto_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world for the tests that stop no daemon; each has a run of its own."""
    with build(moto_server, tmp_path_factory.mktemp("members")) as one:
        yield one


@pytest.fixture(scope="module")
def three(shared: World) -> Iterator[dict[str, Node]]:
    """Members a, b and c; a owns the runs."""
    nodes = {one.root.name: one for one in shared.members("a,b,c")}
    yield nodes
    for one in nodes.values():
        assert one.stop() == 0, one.logged()
        assert "Traceback" not in one.logged()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """The test's own run."""
    return request.node.name.removeprefix("test_").replace("[", "-").rstrip("]")


def part(name: str, step: int = 1) -> dict[str, bytes]:
    """Return the files of one member's part of a save."""
    return {f"model-{name}.safetensors": tensors(1000, f"{name} {step}")}


def save(
    nodes: Mapping[str, Node], place: str, marked: str, parts: Mapping[str, Mapping[str, bytes]]
) -> dict[str, bytes]:
    """Write each member's files on its mount, then the marker on one of them; return all files of the save."""
    for name, files in parts.items():
        for file, data in files.items():
            write(nodes[name].mnt / place / file, data)
    everything = {file: data for files in parts.values() for file, data in files.items()}
    everything[MARKER] = index(sorted(everything))
    write(nodes[marked].mnt / place / MARKER, everything[MARKER])
    return everything


def restored(one: Node, run: str, target: Path) -> dict[str, bytes]:
    """Return what `cachefs restore` brings back, by path in the generation."""
    one.run("restore", run, target, "--store", one.store, *one.options[:2])
    (generation,) = [entry for entry in target.iterdir() if entry.is_dir()]
    return {str(path.relative_to(generation)): path.read_bytes() for path in generation.rglob("*") if path.is_file()}


def promoted(world: World, run: str) -> list[str]:
    """Return the generations that the pointer has named, the oldest first."""
    return [entry["published"]["generation"] for entry in history(world.bucket, run) if entry["kind"] == "promote"]


def shown(one: Node, path: str) -> tuple[str, str]:
    """Return the state and the error that the extended attributes show."""
    names = ("user.cachefs.state", "user.cachefs.error")
    state, error = (os.getxattr(one.mnt / path, name).decode() for name in names)
    return state, error


def await_error(one: Node, path: str, text: str) -> None:
    """Wait until a save shows an error, in the status and in the extended attribute."""
    await_condition(lambda: [text in attempt["error"] for attempt in attempts(one, path)][-1:] == [True], text)
    assert text in shown(one, path)[1]


# saves that are published


@pytest.mark.parametrize("marked", ["a", "b", "c"])
def test_marked_on(shared: World, three: dict[str, Node], run: str, marked: str, tmp_path: Path) -> None:
    """The marker appears on one member, whichever; all close, and one generation has everybody's files."""
    saved = save(three, f"{run}/step-1", marked, {name: part(name) for name in three})
    for one in three.values():
        await_state(one, f"{run}/step-1")
        assert shown(one, f"{run}/step-1") == ("published", "")
    assert promoted(shared, run) == ["step-1"]
    manifest = shared.bucket.manifest(run)
    writers = {path: shard["member"] for shard in manifest["shards"] for path in shard["paths"]}
    assert writers == {**{f"model-{name}.safetensors": name for name in three}, MARKER: marked}
    assert [entry["member"] for entry in manifest["members"]] == ["a", "b", "c"]
    assert_same(shared.bucket.files(run), saved)
    assert_same(restored(three["a"], run, tmp_path / "out"), saved)
    assert_written_once(shared)


def test_members_without_files(shared: World, three: dict[str, Node], run: str) -> None:
    """They say that they have none, and the save does not wait for them."""
    saved = save(three, f"{run}/step-1", "a", {"a": part("a")})
    await_state(three["a"], f"{run}/step-1")
    assert_same(shared.bucket.files(run), saved)
    assert [entry["member"] for entry in shared.bucket.manifest(run)["members"]] == ["a", "b", "c"]
    assert attempts(three["b"], f"{run}/step-1") == []


@pytest.mark.parametrize("writers", ["b", "bc"])
def test_owner_without_files(shared: World, three: dict[str, Node], run: str, writers: str) -> None:
    """Nobody but the owner opens attempts: who has a save asks it to."""
    saved = save(three, f"{run}/step-1", "b", {name: part(name) for name in writers})
    for name in writers:
        await_state(three[name], f"{run}/step-1")
    assert_same(shared.bucket.files(run), saved)
    owners = {entry["owner"].split("/")[0] for entry in history(shared.bucket, run)}
    assert owners == {"a"}
    await_state(three["a"], f"{run}/step-1")  # the owner shows what it has published for others


def test_equal_files(shared: World, three: dict[str, Node], run: str) -> None:
    """A file that every node writes, equal on all of them, is one file of the generation."""
    same = {"config.json": b'{"layers": 3}'}
    saved = save(three, f"{run}/step-1", "c", {name: {**part(name), **same} for name in three})
    await_state(three["c"], f"{run}/step-1")
    assert_same(shared.bucket.files(run), saved)
    paths = [path for shard in shared.bucket.manifest(run)["shards"] for path in shard["paths"]]
    assert sorted(paths) == sorted(saved)


def test_unequal_files(shared: World, three: dict[str, Node], run: str) -> None:
    """Different bytes under one name are no generation: the file and both members are named on every member."""
    save(three, f"{run}/step-1", "b", {name: part(name) for name in three})
    await_state(three["a"], f"{run}/step-1")
    parts = {name: {**part(name, 2), "rng.pt": name.encode()} for name in ("a", "b")}
    save(three, f"{run}/step-2", "b", {**parts, "c": part("c", 2)})
    for one in three.values():
        await_state(one, f"{run}/step-2", "abandoned")
        await_error(one, f"{run}/step-2", "members a and b have different bytes in rng.pt")
    done = three["c"].run("wait", three["c"].mnt / run / "step-2", "--timeout", "5", check=False)
    assert (done.returncode, "rng.pt" in done.stderr) == (1, True)
    assert "have different bytes" in " ".join(three["c"].run("status", three["c"].mnt).stdout.split())
    assert promoted(shared, run) == ["step-1"]
    saved = save(three, f"{run}/step-3", "b", {name: part(name, 3) for name in three})
    await_state(three["b"], f"{run}/step-3")
    assert_same(shared.bucket.files(run), saved)


def test_same_name_again(shared: World, three: dict[str, Node], run: str) -> None:
    """Training that resumed writes a step a second time: the second save replaces the first one, whole."""
    for number in (1, 2):
        saved = save(three, f"{run}/step-1", "c", {name: part(name, number) for name in three})
        for one in three.values():
            await_condition(
                lambda one=one, number=number: states(one, f"{run}/step-1") == ["published"] * number, "published"
            )
        assert_same(shared.bucket.files(run), saved)
    assert promoted(shared, run) == ["step-1", "step-1"]


def test_many_saves_in_a_row(shared: World, three: dict[str, Node], run: str) -> None:
    """Members do not wait for each other between two saves: all are published, in their order."""
    for step in range(1, 6):
        saved = save(three, f"{run}/step-{step}", "abc"[step % 3], {name: part(name, step) for name in three})
    for one in three.values():
        await_state(one, f"{run}/step-5")
    assert promoted(shared, run) == [f"step-{step}" for step in range(1, 6)]
    assert_same(shared.bucket.files(run), saved)


def test_a_single_file_is_one_members(shared: World, three: dict[str, Node], run: str) -> None:
    """A generation that is one file belongs to who writes it; the others are not waited for."""
    data = tensors(500, run)
    write(three["b"].mnt / run / "step_1.safetensors", data)
    await_state(three["b"], f"{run}/step_1.safetensors")
    assert_same(shared.bucket.files(run), {"step_1.safetensors": data})
    assert [entry["member"] for entry in shared.bucket.manifest(run)["members"]] == ["b"]


def test_every_member_says_what_it_waits_for(shared: World, three: dict[str, Node], run: str) -> None:
    """While c's upload is on its way: the owner names c, the others say that they have done their part."""
    upload = Hold()
    shared.proxy.on("PutObject", upload, key=f"/{run}/.*/shards/c/")
    saved = save(three, f"{run}/step-1", "b", {name: part(name) for name in three})
    upload.arrived()
    await_error(three["a"], f"{run}/step-1", "waits for the reports of c")
    await_error(three["b"], f"{run}/step-1", "has reported; waits for the owner")
    await_condition(lambda: states(three["c"], f"{run}/step-1") == ["staged"], "c is flushing")
    timed_out = three["b"].run("wait", three["b"].mnt / run / "step-1", "--timeout", "0.2", check=False)
    assert (timed_out.returncode, "waits for the owner" in timed_out.stderr) == (124, True)
    upload.release()
    for one in three.values():
        await_state(one, f"{run}/step-1")
        assert shown(one, f"{run}/step-1") == ("published", "")
    assert_same(shared.bucket.files(run), saved)


# members that are not there


def test_a_missing_member_is_named_and_the_pointer_stays(world: World) -> None:
    """Its save is abandoned after the deadline; what was published stays, and with the member back all goes on."""
    nodes = {one.root.name: one for one in world.members("a,b,c", "--member-deadline", "2")}
    saved = save(nodes, "run/step-1", "a", {name: part(name) for name in nodes})
    for one in nodes.values():
        await_state(one, "run/step-1")
    nodes["c"].kill()
    save(nodes, "run/step-2", "b", {name: part(name, 2) for name in "ab"})
    for name in "ab":
        await_state(nodes[name], "run/step-2", "abandoned")
        await_error(nodes[name], "run/step-2", "waits for the reports of c for 2 s: a member is missing")
    assert promoted(world, "run") == ["step-1"]
    assert_same(world.bucket.files("run"), saved)
    assert world.bucket.pointer("run")["open"] == []
    nodes["c"].start()
    saved = save(nodes, "run/step-3", "b", {name: part(name, 3) for name in nodes})
    for one in nodes.values():
        await_state(one, "run/step-3")
    assert promoted(world, "run") == ["step-1", "step-3"]
    world.verify(nodes["a"], "run", saved)


def test_an_owner_that_is_no_member(world: World) -> None:
    """A node that only promotes: it never holds a file."""
    nodes = {name: world.node(name, "--members", "b,c", "--owner", "no", *QUICK) for name in "bc"}
    save(nodes, "run/step-1", "c", {name: part(name) for name in nodes})
    await_error(nodes["b"], "run/step-1", "waits for an owner")
    owner = world.node("promoter", "--members", "b,c", "--owner", "yes", *QUICK)
    await_state(nodes["b"], "run/step-1")
    saved = save(nodes, "run/step-2", "b", {name: part(name, 2) for name in nodes})
    for one in nodes.values():
        await_state(one, "run/step-2")
    assert {entry["owner"].split("/")[0] for entry in history(world.bucket, "run")} == {"promoter"}
    assert owner.stop() == 0
    world.verify(nodes["b"], "run", saved)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--members", "a,b"), "is not one of the members a, b"),
        (("--members", "2"), "nothing says which of them this node is"),
        (("--members", "auto"), "no launcher says who they are"),
    ],
)
def test_settings_that_do_not_fit_are_refused(world: World, options: tuple[str, ...], said: str) -> None:
    """Before anything is mounted, with the exit code of a wrong argument, and a word on what to do."""
    code, printed = world.place("stranger").refuses_to_start(*options)
    assert code == 2
    assert said in " ".join(printed.split())
