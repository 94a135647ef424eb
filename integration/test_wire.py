"""What the network and the store do to uploads and publications: lost and false answers, refusals, outages."""

from __future__ import annotations

import pytest

from integration.faults import Trickle, flip
from integration.node import await_condition
from integration.proxy import Action, Hold, altered, answered, cut, lose_answer, lose_request, refused, reset
from integration.world import (
    MIB,
    PART,
    SHARD,
    World,
    assert_same,
    assert_written_once,
    attempts,
    await_state,
    history,
    metric,
    save,
    states,
    status,
    tensors,
    write,
    writes_pointer,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]

FAILURES: dict[int, tuple[Action, str]] = {
    1: (reset, "reset"),
    2: (lose_request, "reset"),
    3: (refused(500, "InternalError"), "5xx"),
    4: (refused(503, "SlowDown"), "throttled"),
    5: (refused(403, "ExpiredToken"), "expired-credentials"),
    6: (answered(502, b"upstream connect error", **{"Content-Type": "text/plain"}), "5xx"),
    7: (answered(200, b"<html>welcome to the hotel</html>", **{"Content-Type": "text/html"}), "not-xml"),
}
"""How each part fails, and the reason that the metric gives."""


def test_a_file_stays_dirty_while_any_part_of_it_fails(world: World) -> None:
    """Reset, dropped, refused or answered by something that is no S3: the part is retried and counted, and its file is
    not reported clean before all of it is there.
    """
    node = world.node(metrics=True)
    saved = {"m.safetensors": tensors(len(FAILURES) * PART + MIB)}
    rules = [
        world.proxy.on("UploadPart", action, where=lambda request, number=number: request.part == number, times=None)
        for number, (action, _) in FAILURES.items()
    ]
    write(node.mnt / "run" / "m.safetensors", saved["m.safetensors"])
    for reason in {reason for _, reason in FAILURES.values()}:
        await_condition(lambda: metric(node, "cachefs_upload_retries_total", reason=reason) > 0, f"{reason} is counted")  # noqa: B023
    await_condition(lambda: all(rule.met for rule in rules), "every part has failed")
    (seen,) = attempts(node, "run/m.safetensors")
    assert (seen["state"], seen["files_flushed"], seen["bytes_flushed"]) == ("staged", 0, 0)
    assert status(node)["backlog_files"] == 1
    assert metric(node, "cachefs_flushed_bytes_total") == 0
    (node.mnt / "run" / "notes.txt").write_text("writes go on")
    for rule in rules:
        rule.end()
    await_state(node, "run/m.safetensors")
    world.verify(node, "run", saved)


ERROR_IN_200 = b'<?xml version="1.0"?>\n<Error><Code>InternalError</Code><Message>late</Message></Error>'


@pytest.mark.parametrize("action", [answered(200, ERROR_IN_200), answered(200, b"<Comple"), cut(40)])
def test_a_completion_that_only_looks_successful_is_a_failure(world: World, action: Action) -> None:
    """A 200 with an <Error> inside or with half a body proves nothing: the object is looked for and completed once."""
    node = world.node()
    saved = {"m.safetensors": tensors(2 * PART)}
    false = world.proxy.on("CompleteMultipartUpload", action)
    write(node.mnt / "run" / "m.safetensors", saved["m.safetensors"])
    await_state(node, "run/m.safetensors")
    assert false.met == 1
    assert len(world.proxy.requests("UploadPart", SHARD)) == 3
    assert_written_once(world)
    world.verify(node, "run", saved)


def test_a_part_the_store_lost_is_sent_again_and_no_other(world: World) -> None:
    """InvalidPart on completion: the parts that the store really holds stay."""
    node = world.node()
    saved = {"m.safetensors": tensors(3 * PART + MIB)}
    completion = Hold()
    world.proxy.on("CompleteMultipartUpload", completion)
    write(node.mnt / "run" / "m.safetensors", saved["m.safetensors"])
    completion.arrived()
    (held,) = world.proxy.requests("CompleteMultipartUpload", SHARD)
    world.bucket.client.upload_part(
        Bucket=world.bucket.bucket, Key=held.key, UploadId=held.query["uploadId"], PartNumber=2, Body=bytes(PART)
    )
    world.proxy.forget()
    completion.release()
    await_state(node, "run/m.safetensors")
    assert held.effect == 400
    assert [request.part for request in world.proxy.requests("UploadPart", SHARD)] == [2]
    assert len(world.proxy.requests("CompleteMultipartUpload", SHARD)) == 1
    world.verify(node, "run", saved)


HARMS: dict[str, Action] = {
    "answer lost": lose_answer,
    "request lost": lose_request,
    "409": refused(409, "ConditionalRequestConflict"),
    "clock skew": refused(403, "RequestTimeTooSkewed"),
    "500 after the effect": lambda exchange: (exchange.forward(), refused(500, "InternalError")(exchange))[1],
}
CONDITIONAL = (SHARD, "/open.json", "/close.json", "/members/", "/manifest.json", "/test.json")


@pytest.mark.parametrize("harm", HARMS)
def test_every_conditional_write_survives_an_unclear_answer(world: World, harm: str) -> None:
    """Whatever becomes of the first try of each conditional write, the save is published, and each object was written
    exactly once.
    """
    node = world.node()
    rules = [world.proxy.on("PutObject", HARMS[harm], key=key) for key in CONDITIONAL]
    rules += [
        world.proxy.on("PutObject", HARMS[harm], where=writes_pointer(kind)) for kind in ("grant", "open", "promote")
    ]
    rules.append(world.proxy.on("CompleteMultipartUpload", HARMS[harm]))
    saved = save(
        node.mnt / "run" / "step-1", {"model-1.safetensors": tensors(PART + MIB), "model-2.safetensors": tensors(9)}
    )
    await_state(node, "run/step-1")
    assert [rule.met for rule in rules] == [1] * len(rules)
    assert_written_once(world)
    begun, aborted = (
        len(world.proxy.requests("CreateMultipartUpload", SHARD)),
        world.proxy.requests("AbortMultipartUpload", SHARD),
    )
    # S3 wants a new upload after a 409 to a completion, and all of its parts.
    assert (begun, [request.query["uploadId"] for request in aborted][:1] != []) == (
        (2, True) if harm == "409" else (1, False)
    )
    assert not world.bucket.client.list_multipart_uploads(Bucket=world.bucket.bucket).get("Uploads")
    assert [pointer["kind"] for pointer in history(world.bucket, "run")] == ["grant", "open", "promote"]
    world.verify(node, "run", saved)


def test_a_storm_on_one_run_stops_no_other(world: World) -> None:
    """503 for everything of one run: it backs off and keeps its bytes, and another run publishes; later both have."""
    node = world.node()
    storm = world.proxy.on("", refused(503, "SlowDown"), key="/runs/stormy/", times=None)
    saved = {"m.safetensors": tensors(4 * PART)}
    calm = {"m.safetensors": tensors(2 * PART, "calm")}
    write(node.mnt / "stormy" / "m.safetensors", saved["m.safetensors"])
    await_condition(lambda: storm.met, "the storm has begun")
    write(node.mnt / "calm" / "m.safetensors", calm["m.safetensors"])
    await_state(node, "calm/m.safetensors")
    assert states(node, "stormy/m.safetensors") == ["staged"]
    tries = storm.met
    storm.end()
    await_state(node, "stormy/m.safetensors")
    assert tries < 100
    world.verify(node, "stormy", saved)
    assert_same(world.bucket.files("calm"), calm)


def test_a_storm_keeps_the_order_of_the_saves_and_kills_none(world: World) -> None:
    """503 for every part, and for every conditional write, of two saves: both are published, in their order, and each
    conditional request was repeated only after a look at what became of it (race 28).
    """
    node = world.node()
    parts = world.proxy.on("UploadPart", refused(503, "SlowDown"), times=None)
    saves = {
        step: save(node.mnt / "run" / f"step-{step}", {"m.safetensors": tensors(PART + MIB, step)}) for step in (1, 2)
    }
    await_condition(lambda: parts.met > 2, "parts are refused")
    writes = world.proxy.on("PutObject", refused(503, "SlowDown"), key="/(members|manifest)", times=2)
    parts.end()
    for step in saves:
        await_state(node, f"run/step-{step}")
    assert writes.met == 2
    assert [states(node, f"run/step-{step}") for step in saves] == [["published"]] * 2
    line = history(world.bucket, "run")
    assert [one["published"]["generation"] for one in line if one["kind"] == "promote"] == ["step-1", "step-2"]
    asked = world.proxy.requests("", "/(members|manifest)")
    for at, request in enumerate(asked[:-1]):
        if request.method == "PUT" and request.effect is None:
            assert (asked[at + 1].method, asked[at + 1].key) == ("HEAD", request.key)
    assert_written_once(world)
    world.verify(node, "run", saves[2])


def test_a_slow_link_delays_its_own_run_only(world: World) -> None:
    """Bytes trickle, up and down, for one run: nothing of it is sent twice, and another run publishes meanwhile."""
    node = world.node()
    link = Trickle()
    world.proxy.on("", link, key="/runs/slow/", times=None)
    saved = {"m.safetensors": tensors(2 * PART + MIB)}
    write(node.mnt / "slow" / "m.safetensors", saved["m.safetensors"])
    await_condition(lambda: link.moved > 20, "bytes trickle")
    for number in range(3):
        write(node.mnt / "fast" / "m.safetensors", tensors(9, number))
        await_state(node, "fast/m.safetensors")
    assert states(node, "slow/m.safetensors") == ["staged"]
    link.release()
    await_state(node, "slow/m.safetensors")
    assert sorted(request.part for request in world.proxy.requests("UploadPart", "/runs/slow/")) == [1, 2, 3]
    world.verify(node, "slow", saved)


@pytest.mark.parametrize("damage", [flip, lambda body: bytes(len(body))], ids=["one bit", "a part of zeros"])
def test_damage_in_the_store_is_found_before_promotion(world: World, damage: object) -> None:
    """What the store gives back differs from what was sent, at its true size: the save is abandoned by the shard's
    name, and the run stays at the save before.
    """
    node = world.node()
    good = {"m-1.safetensors": tensors(9)}
    write(node.mnt / "run" / "m-1.safetensors", good["m-1.safetensors"])
    await_state(node, "run/m-1.safetensors")
    damaged = world.proxy.on(
        "GetObject",
        altered(damage),
        key="m-2.safetensors",
        where=lambda request: "range" in request.headers,
        skip=1,  # type: ignore[arg-type]
    )
    write(node.mnt / "run" / "m-2.safetensors", tensors(2 * PART))
    await_state(node, "run/m-2.safetensors", "abandoned")
    assert damaged.met == 1
    (seen,) = attempts(node, "run/m-2.safetensors")
    assert "shard m-2.safetensors" in seen["error"]
    assert "part 2" in seen["error"]
    assert node.run("wait", node.mnt / "run" / "m-2.safetensors", check=False).returncode == 1
    assert (node.mnt / "run" / "m-2.safetensors").read_bytes() == tensors(2 * PART)
    world.verify(node, "run", good)


@pytest.mark.parametrize(
    ("action", "times"),
    [(cut(1000), 2), (reset, 4), (refused(500, "InternalError"), 4)],
    ids=["cut short", "reset", "500"],
)
def test_a_read_that_fails_condemns_nothing(world: World, action: Action, times: int) -> None:
    """The restore test repeats what it could not read, also when botocore's own three tries are used up."""
    node = world.node()
    failing = world.proxy.on("GetObject", action, key=SHARD, times=times)
    saved = {"m.safetensors": tensors(PART + MIB)}
    write(node.mnt / "run" / "m.safetensors", saved["m.safetensors"])
    await_state(node, "run/m.safetensors")
    assert failing.met == times
    world.verify(node, "run", saved)


def test_an_outage_leaves_no_trace(world: World) -> None:
    """While the store is away a handle opened before goes on working and saves are taken; when it is back everything
    is published unaided.
    """
    node = world.node()
    (node.mnt / "run").mkdir()
    with (node.mnt / "run" / "log").open("wb") as log:
        away = world.proxy.on("", reset, times=None)
        saved: dict[str, bytes] = {}
        for step in (1, 2, 3):
            saved = save(node.mnt / "run" / f"step-{step}", {"model.safetensors": tensors(PART + MIB, step)})
            log.write(b"saved\n")
            log.flush()
        await_condition(lambda: away.met > 5, "the store is missed")
        for step in (1, 2, 3):
            await_state(node, f"run/step-{step}", "staged")
        away.end()
        log.write(b"the store is back\n")
    assert (node.mnt / "run" / "log").read_bytes() == b"saved\n" * 3 + b"the store is back\n"
    await_state(node, "run/step-3")
    assert [states(node, f"run/step-{step}") for step in (1, 2, 3)] == [["published"]] * 3
    world.verify(node, "run", saved)
