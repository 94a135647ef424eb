"""A store that changes under a running mount: another server behind its address, versioning suspended."""

from __future__ import annotations

import os
import signal

import pytest

from integration.faults import ignored
from integration.node import Node, await_condition
from integration.test_engine import engine
from integration.world import (
    MIB,
    SHARD,
    World,
    await_state,
    history,
    metric,
    save,
    states,
    status,
    tensors,
    write,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]

CONDITIONS = ("if-none-match", "if-match")
WATCHED = ("--probe-interval", "0.5")


def blocked(one: Node) -> str:
    return str(status(one)["publishing_blocked"])


def ours(world: World) -> set[tuple[str, str]]:
    """Return every version outside the probe's prefix."""
    return {(key, version) for key in world.bucket.keys("runs/") for version in world.bucket.versions(key)}


def await_probes(world: World, count: int) -> None:
    """Wait for so many more probes."""
    before = len(world.proxy.requests("GetBucketVersioning"))
    await_condition(lambda: len(world.proxy.requests("GetBucketVersioning")) >= before + count, "probes go on")


@pytest.mark.parametrize("header", CONDITIONS)
def test_a_store_that_begins_to_ignore_conditions_gets_nothing_more(world: World, header: str) -> None:
    node = world.node("node", *WATCHED, metrics=True)
    save(node.mnt / "run" / "step-1", {"m.safetensors": tensors(1000)})
    await_state(node, "run/step-1")
    rule = world.proxy.on("", ignored(header), where=lambda request: header in request.headers, times=None)
    await_condition(lambda: blocked(node), "the gate is closed")
    held = ours(world)
    second = save(node.mnt / "run" / "step-2", {"m.safetensors": tensors(1000, 2)})
    (node.mnt / "run" / "notes.txt").write_text("a loose file waits as well")
    await_state(node, "run/step-2", "staged")
    await_probes(world, 2)
    assert ours(world) == held
    assert "not honour" in blocked(node)
    assert {"if-none-match": "P2: ", "if-match": "P6: "}[header] in node.logged()
    await_condition(lambda: metric(node, "cachefs_publishing") == 0, "the metric says so, too")
    assert states(node, "run/step-2") == ["staged"]
    rule.end()
    await_state(node, "run/step-2")
    assert blocked(node) == ""
    await_condition(lambda: metric(node, "cachefs_publishing") == 1, "the metric says so, too")
    assert metric(node, "cachefs_engine_restarts") == 0
    history(world.bucket, "run")
    world.verify(node, "run", second)


def test_a_flush_that_is_under_way_stops_and_goes_on_where_it_was(world: World) -> None:
    node = world.node("node", *WATCHED, "--bandwidth", "4MiB")
    saved = {"m.safetensors": tensors(40 * MIB)}
    write(node.mnt / "run" / "m.safetensors", saved["m.safetensors"])
    await_condition(lambda: world.proxy.requests("UploadPart", SHARD), "the flush is under way")
    rule = world.proxy.on(
        "", ignored(*CONDITIONS), where=lambda r: bool(set(CONDITIONS) & r.headers.keys()), times=None
    )
    await_condition(lambda: blocked(node), "the gate is closed")
    sent = len(world.proxy.requests("UploadPart", SHARD))
    assert sent < 8
    await_probes(world, 2)
    assert len(world.proxy.requests("UploadPart", SHARD)) <= sent + 1  # the one that was under way
    rule.end()
    await_state(node, "run/m.safetensors")
    assert len(world.proxy.requests("CreateMultipartUpload", SHARD)) == 1
    world.verify(node, "run", saved)


def test_versioning_that_is_suspended_and_enabled_again(world: World) -> None:
    node = world.node("node", *WATCHED)
    client, bucket = world.bucket.client, world.bucket.bucket
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    await_condition(lambda: "P0: versioning is off or suspended" in blocked(node), "the gate is closed")
    saved = save(node.mnt / "run" / "step-1", {"m.safetensors": tensors(1000)})
    await_state(node, "run/step-1", "staged")
    await_probes(world, 2)
    assert ours(world) == set()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    await_state(node, "run/step-1")
    world.verify(node, "run", saved)


def test_a_store_that_loses_ranges_is_read_whole_and_no_save_is_given_up_for_it(world: World) -> None:
    """The restore test gets other bytes than it asked for. That would condemn the save; but first the store is asked
    again whether it is still the one that passed.
    """
    node = world.node("node", "--probe-interval", "1h")
    world.proxy.on("GetObject", ignored("range"), where=lambda request: "range" in request.headers, times=None)
    saved = save(node.mnt / "run" / "step-1", {"m.safetensors": tensors(1000)})
    await_state(node, "run/step-1")
    assert "ranges of a version are read differently" in node.logged()
    assert states(node, "run/step-1") == ["published"]
    world.verify(node, "run", saved)


def test_an_engine_that_starts_behind_a_closed_gate_finds_it_closed(world: World) -> None:
    node = world.node("node", *WATCHED, metrics=True)
    rule = world.proxy.on("", ignored("if-match"), where=lambda request: "if-match" in request.headers, times=None)
    await_condition(lambda: blocked(node), "the gate is closed")
    held = ours(world)
    os.kill(engine(node), signal.SIGKILL)
    saved = save(node.mnt / "run" / "step-1", {"m.safetensors": tensors(1000)})
    await_condition(lambda: metric(node, "cachefs_engine_restarts") == 1, "another engine works")
    await_state(node, "run/step-1", "staged")
    await_probes(world, 2)
    assert ours(world) == held
    assert blocked(node)
    rule.end()
    await_state(node, "run/step-1")
    world.verify(node, "run", saved)
