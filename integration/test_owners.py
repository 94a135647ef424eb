"""Two daemons on one run: the later one owns it, the earlier one notices, and no write of it can win any more."""

from __future__ import annotations

import json
import os
import signal

import pytest

from integration.node import Node, await_condition, engine
from integration.proxy import Hold
from integration.world import (
    MIB,
    PART,
    POINTER,
    World,
    assert_same,
    attempts,
    await_state,
    history,
    metric,
    save,
    states,
    status,
    tensors,
    writes_pointer,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]


def fenced_by(one: Node, run: str = "run") -> str:
    """Return who has taken a run from a node, or ""."""
    return next((seen["fenced_by"] for seen in status(one)["runs"] if seen["run"] == run), "")


def train(one: Node, step: int) -> dict[str, bytes]:
    """Write one complete save."""
    return save(one.mnt / "run" / f"step-{step}", {"model.safetensors": tensors(PART + MIB, f"{one.root.name} {step}")})


def test_the_later_daemon_owns_the_run_until_the_first_is_started_again(world: World) -> None:
    """A second daemon takes the next epoch. The first says that it is fenced wherever one can look, keeps taking saves,
    and sends nothing more; started again, it takes the run back and publishes what it kept.
    """
    first = world.node("first", metrics=True)
    second = world.node("second")
    train(first, 1)
    await_state(first, "run/step-1")
    upload = Hold()
    world.proxy.on("UploadPart", upload, key="/shards/first/", times=None)
    train(first, 20)
    upload.arrived()
    train(second, 2)
    await_state(second, "run/step-2")
    await_condition(lambda: fenced_by(first), "the first daemon is fenced")
    assert "second" in fenced_by(first)
    world.proxy.forget()
    upload.release()
    kept = train(first, 30)
    await_state(first, "run/step-30", "fenced")
    assert os.getxattr(first.mnt / "run" / "step-20", "user.cachefs.state") == b"fenced"
    assert first.run("wait", first.mnt / "run" / "step-30", "--timeout", "30", check=False).returncode == 79
    flushed = first.run("flush", first.mnt, check=False)
    assert (flushed.returncode, "2 closed saves stay in staging (run/step-20)" in flushed.stderr) == (79, True)
    await_condition(lambda: metric(first, "cachefs_fenced", run="run") == 1, "the metric says it")
    assert metric(first, "cachefs_epoch", run="run") == 0
    train(second, 3)
    await_state(second, "run/step-3")
    owned = {attempt["attempt"] for step in (2, 3) for attempt in attempts(second, f"run/step-{step}")}
    writes = [request for request in world.proxy.requests("", "/runs/") if request.method in ("PUT", "POST")]
    assert writes
    assert not [
        request.key
        for request in writes
        if "/attempts/" in request.key and request.key.split("/attempts/")[1].split("/")[0] not in owned
    ]
    assert_same(world.bucket.files("run"), save_of(second, 3))
    assert first.stop() in (0, 75)
    first.start()
    await_state(first, "run/step-30")
    assert states(first, "run/step-20") == ["published"]
    await_condition(lambda: fenced_by(second), "the second daemon is fenced in turn")
    assert second.stop() == 0
    line = history(world.bucket, "run")
    assert [pointer["epoch"] for pointer in line if pointer["kind"] == "grant"] == [1, 2, 3]
    assert [pointer["published"]["generation"] for pointer in line if pointer["kind"] == "promote"] == [
        "step-1", "step-2", "step-3", "step-20", "step-30",
    ]  # fmt: skip
    world.verify(first, "run", kept)


def save_of(one: Node, step: int) -> dict[str, bytes]:
    """Return the files of a save in the mount."""
    directory = one.mnt / "run" / f"step-{step}"
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("written", [True, False], ids=["on the wire", "not yet written"])
def test_an_owner_that_slept_through_a_takeover_cannot_promote(world: World, written: bool) -> None:
    """The owner is stopped when it has read the pointer and found that it may promote, before its request is sent or
    while it is on the wire. Another one publishes; the owner wakes up and its request arrives: it must not win, and the
    owner learns that it is fenced (race 2).
    """
    # Only the promotion looks at the pointer here, so that is what is held.
    first, second = world.node("first", "--pointer-poll", "3600"), world.node("second")
    train(first, 1)
    await_state(first, "run/step-1")
    if written:
        promotion = Hold()
        world.proxy.on("PutObject", promotion, where=writes_pointer("promote"))
        train(first, 2)
    else:
        tested, promotion = Hold(), Hold(after=True)
        world.proxy.on("PutObject", tested, key="/test.json$")
        train(first, 2)
        tested.arrived()
        world.proxy.on("GetObject", promotion, key=POINTER)
        tested.release()
    promotion.arrived()
    assert first.process is not None
    stopped = (first.process.pid, engine(first))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    saved = train(second, 3)
    await_state(second, "run/step-3")
    promotion.release()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    await_state(first, "run/step-2", "fenced")
    promotions = [one for one in world.proxy.requests("PutObject", POINTER) if writes_pointer("promote")(one)]
    (late,) = [one for one in promotions if json.loads(one.body)["published"]["generation"] == "step-2"]
    await_condition(lambda: late.effect is not None, "the late request has reached the store")
    assert late.effect == 412
    assert "second" in fenced_by(first)
    assert not fenced_by(second)
    line = history(world.bucket, "run")
    assert [(pointer["kind"], pointer["epoch"]) for pointer in line] == [
        ("grant", 1), ("open", 1), ("promote", 1), ("open", 1), ("grant", 2), ("open", 2), ("promote", 2),
    ]  # fmt: skip
    assert first.stop() in (0, 75)
    second.kill()
    world.verify(second, "run", saved)


@pytest.mark.parametrize("lost", [False, True], ids=["late", "lost"])
def test_a_promotion_that_landed_before_the_takeover_is_known_as_published(world: World, lost: bool) -> None:
    """The answer to a promotion is late or never comes, and another daemon has taken the run since: the save was
    published all the same, and its owner says so (race 5).
    """
    first, second = world.node("first"), world.node("second")
    promotion = Hold(after=True, lost=lost)
    world.proxy.on("PutObject", promotion, where=writes_pointer("promote"))
    train(first, 1)
    promotion.arrived()
    saved = train(second, 2)
    await_state(second, "run/step-2")
    promotion.release()
    await_state(first, "run/step-1")
    kinds = [pointer["kind"] for pointer in history(world.bucket, "run")]
    assert kinds == ["grant", "open", "promote"] * 2
    assert first.stop() == 0
    world.verify(second, "run", saved)


def test_two_daemons_that_start_the_same_run_at_once(world: World) -> None:
    """Both want the first epoch: one gets it and the other the next, and exactly one of them stays the owner."""
    nodes = [world.node("first"), world.node("second")]
    grants = Hold()
    world.proxy.on("PutObject", grants, key=POINTER, times=2)
    for step, one in enumerate(nodes, 1):
        train(one, step)
    await_condition(lambda: len(world.proxy.requests("PutObject", POINTER)) == 2, "both ask for the run")
    grants.release()
    await_condition(lambda: any(fenced_by(one) for one in nodes), "one of them is fenced")
    (owner,) = [one for one in nodes if not fenced_by(one)]
    saved = train(owner, 9)
    await_state(owner, "run/step-9")
    assert sorted(request.effect or 0 for request in world.proxy.requests("PutObject", POINTER)[:2]) == [
        200,
        412,
    ]
    for one in nodes:
        if one is not owner:
            assert one.stop() in (0, 75)
    world.verify(owner, "run", saved)


def test_the_promotion_of_a_dead_owner_arrives_after_its_successors(world: World) -> None:
    """An owner dies with its promotion on the wire. Another takes over and publishes a newer step, and then the old
    request arrives: refused. The dead one comes back under a third epoch: its older step is superseded, not published
    over the newer one, and its next save is published (races 2, 6, 10, 11).
    """
    first, second = world.node("first"), world.node("second")
    promotion = Hold()
    world.proxy.on("PutObject", promotion, where=writes_pointer("promote"))
    train(first, 2)
    promotion.arrived()
    (held,) = [one for one in world.proxy.requests("PutObject", POINTER) if writes_pointer("promote")(one)]
    first.kill()
    train(second, 9)
    await_state(second, "run/step-9")
    promotion.release()
    await_condition(lambda: held.effect is not None, "the old promotion has reached the store")
    assert held.effect == 412
    assert world.bucket.pointer("run")["published"]["generation"] == "step-9"
    first.start()
    await_state(first, "run/step-2", "abandoned")
    (seen,) = attempts(first, "run/step-2")
    assert "step 2 is not newer than the published step 9" in seen["error"]
    saved = train(first, 10)
    await_state(first, "run/step-10")
    line = history(world.bucket, "run")
    assert [pointer["epoch"] for pointer in line if pointer["kind"] == "grant"] == [1, 2, 3]
    assert len({pointer["owner"] for pointer in line}) == 3
    assert [pointer["published"]["generation"] for pointer in line if pointer["kind"] == "promote"] == [
        "step-9",
        "step-10",
    ]
    assert second.stop() in (0, 75)
    world.verify(first, "run", saved)
