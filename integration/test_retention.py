"""Garbage collection and rollback with a real daemon, the command line and an S3 server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cachefs.formats.codec import encode
from cachefs.formats.keys import Keys
from cachefs.formats.lease import Lease
from integration.node import Node, await_condition
from integration.world import World, assert_same, attempts, await_state, history, metric, save, states, tensors

pytestmark = [pytest.mark.mount, pytest.mark.server]

LEAST = ("--keep-last", "1", "--keep-hourly", "0", "--keep-daily", "0", "--gc-grace", "0")


def train(one: Node, step: int) -> dict[str, bytes]:
    """Write one complete save, of which one file is sent in parts."""
    files = {"a.safetensors": tensors(6 << 20, step), "deep/b.safetensors": tensors(100, -step)}
    return save(one.mnt / "run" / f"step-{step}", files)


def ask(world: World, one: Node, command: str, *arguments: str, code: int = 0) -> Any:
    """Run a command that needs the store alone."""
    place = ("--store", one.store, "--endpoint-url", world.proxy.url)
    done = one.run(command, *arguments, *place, check=False)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stderr


def stored(world: World) -> set[str]:
    """Return the attempts of which anything is stored."""
    prefix = f"{world.bucket.prefix}runs/run/attempts/"
    return {key.removeprefix(prefix).split("/")[0] for key in world.bucket.keys("runs/run/attempts/")}


def published(one: Node, step: int) -> str:
    """Wait until a step is published; return its attempt."""
    await_state(one, f"run/step-{step}")
    return str(attempts(one, f"run/step-{step}")[-1]["attempt"])


def test_gc_and_rollback_from_the_command_line(world: World, tmp_path) -> None:
    """Saves, a dry run, a run, a rollback, training that goes on, and a restore at the end."""
    one = world.node()
    saved = {step: train(one, step) for step in (1, 2, 3, 4)}
    ids = {step: published(one, step) for step in saved}
    [plan] = ask(world, one, "gc", "run", "--dry-run", "--json", *LEAST)
    assert [entry["generation"] for entry in plan["kept"]] == ["step-4", "step-3"]
    assert stored(world) == set(ids.values())
    [done] = ask(world, one, "gc", "run", "--run", "--json", *LEAST)
    assert (done["retire"], done["deleted"]) == (plan["retire"], sum(one["objects"] for one in plan["retire"]))
    assert stored(world) == {ids[3], ids[4]}
    assert "garbage collection has removed it" in ask(world, one, "rollback", "run", "step-1", code=66)

    back = ask(world, one, "rollback", "run", "step-3", "--json")
    assert (back["left"], back["changed"]) == ("step-4", True)
    assert_same(world.bucket.files("run"), saved[3])
    saved[5] = train(one, 5)
    await_state(one, "run/step-5")
    kinds = [pointer["kind"] for pointer in history(world.bucket, "run")]
    assert kinds[-4:] == ["retire", "rollback", "open", "promote"]
    assert kinds.count("retire") == 2
    one.restore("run", tmp_path / "out", "-g", "step-3", "--endpoint-url", world.proxy.url)
    assert (tmp_path / "out/step-3/a.safetensors").read_bytes() == saved[3]["a.safetensors"]
    assert [key for key in world.bucket.keys("runs/run/") if "/leases/" in key] == []
    deletes = world.proxy.requests("DeleteObject", "/runs/")
    assert deletes
    world.verify(one, "run", saved[5])


def test_the_daemon_collects_and_waits_for_readers(world: World) -> None:
    """With `gc` on, what the policy does not keep goes by itself; a generation with a lease stays until it ends."""
    one = world.node("node", "--gc", "--gc-interval", "0.3s", *LEAST, metrics=True)
    train(one, 1)
    ids = {1: published(one, 1)}
    lease = Lease(run="run", generation="step-1", attempt=ids[1], holder="a test", created_at="")
    key = Keys(world.bucket.prefix.rstrip("/")).lease("run", "1" * 32)
    world.bucket.client.put_object(Bucket=world.bucket.bucket, Key=key, Body=encode(lease))
    saved = {}
    for step in (2, 3, 4):
        saved = train(one, step)
        ids[step] = published(one, step)
    await_condition(lambda: stored(world) == {ids[1], ids[3], ids[4]}, "step-2 was collected")
    [version] = world.bucket.versions(key)
    world.bucket.client.delete_object(Bucket=world.bucket.bucket, Key=key, VersionId=version)
    await_condition(lambda: stored(world) == {ids[3], ids[4]}, "step-1 follows when its reader has ended")
    await_condition(lambda: metric(one, "cachefs_gc_passes_total") > 2, "passes are counted")
    await_condition(lambda: metric(one, "cachefs_gc_freed_bytes_total") > 12 << 20, "and what they freed")
    assert metric(one, "cachefs_gc_failures_total") == 0
    assert states(one, "run/step-1") == ["published"]
    world.verify(one, "run", saved)
