"""Credentials that expire in the middle of a save: what was refused is repeated with the new ones, with no restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from integration.node import Node, await_condition, node
from integration.proxy import Hold, Request, refused
from integration.world import (
    MIB,
    PART,
    SHARD,
    World,
    assert_written_once,
    attempts,
    await_state,
    save,
    states,
    tensors,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]


class Keys:
    """Credentials from a process, as with roles: boto3 asks it again when they are about to expire."""

    def __init__(self, root: Path) -> None:
        self._answer = root / "credentials.json"
        (root / "config").write_text(f"[default]\ncredential_process = cat {self._answer}\n")
        self.environ = {"AWS_CONFIG_FILE": str(root / "config"), "AWS_DEFAULT_REGION": "us-east-1"}

    def give(self, key: str) -> None:
        """Let the process answer with these from now on; boto3 asks at each request, since they end within 15 min."""
        expires = (datetime.now(UTC) + timedelta(minutes=13)).isoformat()
        answer = {"AccessKeyId": key, "SecretAccessKey": "secret", "SessionToken": "token", "Expiration": expires}
        made = self._answer.with_suffix(".new")
        made.write_text(json.dumps({"Version": 1, **answer}))
        made.rename(self._answer)


def signed_by(key: str) -> Callable[[Request], bool]:
    """Return the condition that a request is signed with a key."""
    return lambda request: f"Credential={key}/" in request.headers["authorization"]


def test_credentials_that_expire_in_the_middle_of_an_upload(world: World, tmp_path: Path) -> None:
    """403 ExpiredToken for parts, then for the completion: the file stays dirty and the reason is shown. With new
    credentials the upload goes on where it was: no part that was taken goes again, and there is one upload (race 29).
    """
    keys = Keys(tmp_path)
    keys.give("FIRST")
    options = ("--endpoint-url", world.proxy.url, "--part-size", "5MiB", "--member", "node")
    store = f"s3://{world.bucket.bucket}/ckpt"
    with node(world.root / "node", store, options=options, environ=keys.environ) as one:
        parts, completion = Hold(), Hold(refused(403, "ExpiredToken"))
        world.proxy.on("UploadPart", parts, skip=2)
        saved = save(one.mnt / "run" / "step-1", {"model.safetensors": tensors(4 * PART + MIB)})
        parts.arrived()
        expire(world, one, parts, "FIRST")
        world.proxy.on("CompleteMultipartUpload", completion)
        keys.give("SECOND")
        completion.arrived()
        expire(world, one, completion, "SECOND")
        keys.give("THIRD")
        await_state(one, "run/step-1")
        sent = [request.part for request in world.proxy.requests("UploadPart", SHARD) if request.effect == 200]
        assert sorted(sent) == [1, 2, 3, 4, 5]
        assert len(world.proxy.requests("CreateMultipartUpload", SHARD)) == 1
        assert [r.effect for r in world.proxy.requests("CompleteMultipartUpload", SHARD)].count(200) == 1
        assert all(signed_by("THIRD")(request) for request in world.proxy.requests("PutObject", "/manifest.json$"))
        assert_written_once(world)
        world.verify(one, "run", saved)


def expire(world: World, one: Node, at: Hold, key: str) -> None:
    """Let credentials expire while a request signed with them is held; returns when that was noticed."""
    expired = world.proxy.on("", refused(403, "ExpiredToken"), where=signed_by(key), times=None)
    at.release()
    await_condition(lambda: expired.met > 3, "the old credentials are refused")
    assert states(one, "run/step-1") == ["staged"]
    # A HEAD has no body to say "expired" in, so the reason may be no more than a 403.
    await_condition(lambda: "403" in attempts(one, "run/step-1")[0]["error"], "the reason is shown")
