"""Requests that arrive late or twice, and answers that are old: none changes what was decided meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from integration.faults import Delayed
from integration.node import await_condition
from integration.proxy import Answer, Exchange, Hold, Request
from integration.world import (
    MIB,
    PART,
    POINTER,
    World,
    assert_written_once,
    attempts,
    await_state,
    history,
    on_both,
    save,
    tensors,
    writes_pointer,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]

OBJECTS = ("model-2", "/open.json", "/close.json", "/members/", "/manifest.json", "/test.json")
KINDS = ("grant", "open", "promote")
FILES = {"model-1.safetensors": tensors(PART + MIB), "model-2.safetensors": tensors(9)}


def everything(world: World) -> dict[str, list[str]]:
    """Return every key of the runs with its version ids."""
    return {key: world.bucket.versions(key) for key in world.bucket.keys("runs/")}


@on_both
def test_second_copies_that_arrive_after_a_takeover_change_nothing(world: World) -> None:
    """Of every conditional write a second copy is on its way. It arrives when another daemon owns the run: each is
    refused, and no object has got another version (race 6).
    """
    first, second = world.node("first"), world.node("second")
    copies = Delayed(copy=True)
    for key in OBJECTS:
        world.proxy.on("PutObject", copies, key=key)
    for kind in KINDS:
        world.proxy.on("PutObject", copies, where=writes_pointer(kind))
    world.proxy.on("CompleteMultipartUpload", copies)
    save(first.mnt / "run" / "step-1", FILES)
    await_state(first, "run/step-1")
    saved = save(second.mnt / "run" / "step-2", FILES)
    await_state(second, "run/step-2")
    before, line = everything(world), history(world.bucket, "run")
    landed = copies.land()
    assert len(landed) == len(OBJECTS) + len(KINDS) + 1
    # Both servers answer a second completion of an upload with the version that the first one made.
    assert [status for request, status in landed if request.method == "PUT"] == [412] * (len(landed) - 1)
    assert everything(world) == before
    assert history(world.bucket, "run") == line
    assert first.stop() in (0, 75)
    world.verify(second, "run", saved)


def test_a_first_copy_that_lands_after_the_second_was_sent(world: World) -> None:
    """The first copy of a write is so late that the read-back finds nothing and the request is sent again; then the
    first one lands, and the second is refused. That is a success, and the two are the same request (races 4, 7).
    """
    node = world.node()
    where: list[tuple[str, Any]] = [(key, None) for key in OBJECTS] + [("", kind) for kind in KINDS]
    pairs = []
    for key, kind in where:
        matches = writes_pointer(kind) if kind else lambda request: True
        second, first = Hold(), Delayed()
        world.proxy.on("PutObject", second, key=key, where=matches)
        world.proxy.on("PutObject", first, key=key, where=matches)  # the newest rule acts first
        pairs.append((first, second))
    saved = save(node.mnt / "run" / "step-1", {"model-2.safetensors": FILES["model-2.safetensors"]})
    grant, announcement, promotion = pairs[len(OBJECTS) :]
    shard, opened, *rest = pairs[: len(OBJECTS)]
    for first, second in (grant, opened, announcement, shard, *rest, promotion):
        second.arrived()
        ((_, status),) = first.land()
        assert status == 200
        second.release()
    await_state(node, "run/step-1")
    for key, kind in where:
        sent = [
            request
            for request in world.proxy.requests("PutObject", key)
            if (writes_pointer(kind)(request) if kind else True)
        ]
        once, again = sent
        assert (once.effect, again.effect) == (200, 412)
        assert same_request(once) == same_request(again)
    assert_written_once(world)
    assert [pointer["kind"] for pointer in history(world.bucket, "run")] == list(KINDS)
    world.verify(node, "run", saved)


def same_request(request: Request) -> tuple[object, ...]:
    """Return what must be equal in a retry (I11)."""
    conditions = {name: request.headers.get(name) for name in ("if-match", "if-none-match")}
    written = {name: value for name, value in request.headers.items() if name.startswith("x-amz-meta-")}
    return request.key, request.body, conditions, written


class Lagging:
    """Answers reads of a pointer as a replica does that has not got the newest version yet."""

    def __init__(self, world: World) -> None:
        self._bucket = world.bucket

    def __call__(self, exchange: Exchange) -> None:
        key = exchange.request.key
        listed = self._bucket.client.list_object_versions(Bucket=self._bucket.bucket, Prefix=key)["Versions"]
        older = next(version["VersionId"] for version in listed if not version["IsLatest"])
        found = self._bucket.client.get_object(Bucket=self._bucket.bucket, Key=key, VersionId=older)
        headers = {"ETag": found["ETag"], "x-amz-version-id": older, "Content-Type": "application/json"}
        exchange.reply(Answer(200, found["Body"].read(), headers))


@pytest.mark.parametrize("at", ["/open.json$", "/test.json$"], ids=["announcement", "promotion"])
def test_an_old_pointer_from_a_lagging_replica_or_a_cache_costs_time_only(world: World, at: str) -> None:
    """Before an announcement, or a promotion, and in the read-back after it, the pointer reads one version too old: the
    write is refused and repeated until the reads are fresh. Nothing is lost, nothing is published twice (races 14, 15).
    """
    node = world.node("node", "--pointer-poll", "3600")
    save(node.mnt / "run" / "step-1", {"model-2.safetensors": tensors(9)})
    await_state(node, "run/step-1")
    step = Hold()
    world.proxy.on("PutObject", step, key=at)
    saved = save(node.mnt / "run" / "step-2", {"model-2.safetensors": tensors(10)})
    step.arrived()
    lag = world.proxy.on(
        "GetObject", Lagging(world), key=POINTER, where=lambda request: "versionId" not in request.query, times=3
    )
    step.release()
    await_condition(lambda: lag.met == 3, "the pointer was read too old")
    await_state(node, "run/step-2")
    (seen,) = attempts(node, "run/step-2")
    assert seen["error"] == ""
    kinds = [pointer["kind"] for pointer in history(world.bucket, "run")]
    assert kinds == [*KINDS, "open", "promote"]
    world.verify(node, "run", saved)
