"""The store is not what the probe found, from the start or later: conditions and versions lost, the pointer hidden, the
local disk gone.
"""

from __future__ import annotations

import json

import pytest

from integration.faults import ignored
from integration.node import Node, await_condition
from integration.proxy import Hold, cut, refused
from integration.world import (
    MIB,
    PART,
    POINTER,
    SHARD,
    World,
    assert_same,
    attempts,
    await_state,
    contents,
    history,
    on_both,
    save,
    states,
    status,
    tensors,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]

LOST: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "creates overwrite": (("if-none-match",), {"P2", "P3", "P10", "P17"}),
    "swaps overwrite": (("if-match",), {"P4", "P6", "P7", "P14", "P18"}),
}
"""Headers that never reach the server, and the checks of the probe that must fail then (at least these)."""


def files(seed: int = 0) -> dict[str, bytes]:
    """Return the files of a small save."""
    return {"model.safetensors": tensors(9, seed)}


@pytest.mark.parametrize("lost", LOST)
@on_both
def test_a_store_that_ignores_conditions_is_refused_at_the_mount(world: World, lost: str) -> None:
    """`cachefs mount` ends with the documented code, nothing is left in the bucket, and doctor names the checks."""
    headers, failing = LOST[lost]
    world.proxy.on("", ignored(*headers), times=None)
    store = f"s3://{world.bucket.bucket}/ckpt"
    one = Node(world.root / "node", store, environ=world._server.environ)
    endpoint = ("--endpoint-url", world.proxy.url)
    code, said = one.refuses_to_start(*endpoint)
    assert code == 76
    assert "--no-publish" in said
    assert not world.bucket.keys("")
    done = one.run("doctor", "--store", store, *endpoint, "--json", check=False)
    assert done.returncode == 76
    failed = {finding["what"].removeprefix("probe ") for finding in json.loads(done.stdout) if not finding["ok"]}
    assert failing <= failed


def test_a_rule_of_the_bucket_that_deletes_what_is_published(world: World) -> None:
    """At the start it refuses the mount; one that appears later stops publication until it is gone (race 35)."""
    client, bucket = world.bucket.client, world.bucket.bucket
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "ckpt/"}, "Expiration": {"Days": 30}}
    node = world.place("node", "--probe-interval", "0.5")
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    code, said = node.refuses_to_start()
    assert code == 76
    assert "lifecycle rules of the bucket delete what is published" in said
    assert "'tidy'" in said
    client.delete_bucket_lifecycle(Bucket=bucket)
    node.start()
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    await_condition(lambda: "'tidy'" in str(status(node)["publishing_blocked"]), "publication has stopped")
    saved = save(node.mnt / "run" / "step-1", files(1))
    await_state(node, "run/step-1", "staged")
    assert not world.bucket.keys("runs/")
    client.delete_bucket_lifecycle(Bucket=bucket)
    await_state(node, "run/step-1")
    world.verify(node, "run", saved)


def test_a_shard_that_a_rule_has_moved_to_an_archive(world: World) -> None:
    """The restore ends with what to do, and leaves nothing half restored (race 35)."""
    node = world.node()
    save(node.mnt / "run" / "step-1", files(1))
    await_state(node, "run/step-1")
    world.proxy.on("GetObject", refused(403, "InvalidObjectState"), key=SHARD, times=None)
    target = world.root / "restored"
    options = ("--store", node.store, *node.options[:2])
    done = node.run("restore", "run", target, *options, check=False)
    assert done.returncode == 69
    assert "the object is in an archive tier: restore it first" in done.stderr
    assert not list(target.iterdir())
    world.proxy.end()
    node.run("restore", "run", target, *options)
    assert contents(target / "step-1") == world.bucket.files("run")


def test_conditions_that_the_store_forgets_later_stop_publication(world: World) -> None:
    """A gateway is rolled back: the manifest's key had other bytes, and the create went through all the same. Two
    versions are noticed before anything names them; the pointer stays (race 40).
    """
    node = world.node()
    good = save(node.mnt / "run" / "step-1", files(1))
    await_state(node, "run/step-1")
    manifest = Hold(ignored("if-none-match"))
    world.proxy.on("PutObject", manifest, key="/manifest.json$")
    save(node.mnt / "run" / "step-2", files(2))
    manifest.arrived()
    key = world.proxy.requests("PutObject", "/manifest.json$")[-1].key
    world.bucket.client.put_object(Bucket=world.bucket.bucket, Key=key, Body=b"{}")
    manifest.release()
    await_condition(lambda: attempts(node, "run/step-2")[0]["error"], "the reason is shown")
    (seen,) = attempts(node, "run/step-2")
    assert "2 versions" in seen["error"]
    assert seen["state"] == "flushed"
    assert len(world.bucket.versions(key)) == 2
    assert world.bucket.pointer("run")["published"]["generation"] == "step-1"
    node.kill()
    world.verify(node, "run", good)


def versioning(world: World, state: str) -> None:
    """Suspend or enable the versions of the bucket."""
    world.bucket.client.put_bucket_versioning(Bucket=world.bucket.bucket, VersioningConfiguration={"Status": state})


@on_both
def test_versions_that_are_suspended_later_stop_publication(world: World) -> None:
    """Writes give no version id any more: nothing can be pinned, so nothing is published, and the reason is shown. With
    versions again, what was written without is abandoned, and the next save is published (race 39).
    """
    node = world.node()
    save(node.mnt / "run" / "step-1", files(1))
    await_state(node, "run/step-1")
    versioning(world, "Suspended")
    save(node.mnt / "run" / "step-2", files(2))
    await_state(node, "run/step-2", "staged")

    def reason() -> str:
        """Shown with the save if its bytes were refused first, and for all saves if what opens it was."""
        return str(attempts(node, "run/step-2")[0]["error"] or status(node)["publishing_blocked"])

    await_condition(lambda: "versioning" in reason(), "the reason is shown")
    assert states(node, "run/step-2") == ["staged"]
    assert world.bucket.pointer("run")["published"]["generation"] == "step-1"
    versioning(world, "Enabled")
    await_state(node, "run/step-2", "abandoned")
    assert "cannot be pinned" in attempts(node, "run/step-2")[0]["error"]
    saved = save(node.mnt / "run" / "step-3", files(3))
    await_state(node, "run/step-3")
    world.verify(node, "run", saved)


def test_a_hidden_pointer_halts_the_run_until_it_is_back(world: World) -> None:
    """An operator's delete marker hides the pointer. A daemon that knew it and one that did not both write nothing, not
    even a first pointer, say why, and go on by themselves when the marker is removed (race 8).
    """
    known, fresh = world.node("known"), world.node("fresh")
    save(known.mnt / "run" / "step-1", files(1))
    await_state(known, "run/step-1")
    client, where = world.bucket.client, {"Bucket": world.bucket.bucket, "Key": "ckpt/runs/run/pointer.json"}
    marker = client.delete_object(**where)["VersionId"]
    world.proxy.forget()
    for step, one in ((2, known), (3, fresh)):
        save(one.mnt / "run" / f"step-{step}", files(step))
        await_condition(lambda: "is gone" in attempts(one, f"run/step-{step}")[0]["error"], "the reason is shown")  # noqa: B023
    assert not world.proxy.requests("PutObject", POINTER)
    client.delete_object(**where, VersionId=marker)
    # Who owns the run in the end is up to who looks first; if it is not the one that knew it, that one is fenced.
    saved = save(fresh.mnt / "run" / "step-4", files(4))
    await_state(fresh, "run/step-4")
    assert states(fresh, "run/step-3") == ["published"]
    epochs = [pointer["epoch"] for pointer in history(world.bucket, "run") if pointer["kind"] == "grant"]
    assert epochs == [1, 2]
    for one in (known, fresh):
        one.kill()
    world.verify(fresh, "run", saved)


def test_a_lost_disk_takes_the_half_sent_save_with_it_and_nothing_else(world: World) -> None:
    """The node dies in the middle of an upload and its disk is lost. Its next daemon knows nothing of the save: it
    publishes later ones, the half of the old one is never named, and its late part does no harm (race 38).
    """
    node = world.node()
    save(node.mnt / "run" / "step-1", files(1))
    await_state(node, "run/step-1")
    part = Hold()
    world.proxy.on("UploadPart", part, where=lambda request: request.part == 2)
    save(node.mnt / "run" / "step-2", {"model.safetensors": tensors(PART + MIB)})
    part.arrived()
    (held,) = [request for request in world.proxy.requests("UploadPart", SHARD) if request.part == 2]
    (lost,) = {request.key.split("/attempts/")[1].split("/")[0] for request in [held]}
    node.kill()
    node.wipe_staging()
    node.start()
    assert states(node, "run/step-2") == []
    saved = save(node.mnt / "run" / "step-3", files(3))
    await_state(node, "run/step-3")
    part.release()
    await_condition(lambda: held.effect is not None, "the late part has reached the store")
    line = history(world.bucket, "run")
    assert [p["published"]["generation"] for p in line if p["kind"] == "promote"] == ["step-1", "step-3"]
    assert not [p for p in line if p["published"] and p["published"]["attempt"] == lost]
    listed = world.bucket.client.list_object_versions(Bucket=world.bucket.bucket, Prefix=held.key)
    assert "Versions" not in listed
    node.kill()
    world.verify(node, "run", saved)


def test_a_connection_that_breaks_in_the_middle_of_a_restore(world: World) -> None:
    """The rest of the shard is read, and nothing begins again."""
    node = world.node()
    saved = save(node.mnt / "run" / "step-1", {"model.safetensors": tensors(3 * PART)})
    await_state(node, "run/step-1")
    broken = [world.proxy.on("GetObject", cut(length), key=SHARD) for length in (9, 2 * MIB)]
    target = world.root / "restored"
    node.run("restore", "run", target, "--store", node.store, *node.options[:2])
    assert [rule.met for rule in broken] == [1, 1]
    assert_same(contents(target / "step-1"), saved)
