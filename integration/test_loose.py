"""Loose files: mirrored while the training goes on."""

from __future__ import annotations

import pytest

from integration.node import await_condition
from integration.world import World

pytestmark = [pytest.mark.mount, pytest.mark.server]


def mirrored(world: World) -> bytes:
    """Return the newest version of the only mirror."""
    (key,) = world.bucket.keys("runs/run/loose/")
    return world.bucket.get(key)


def test_a_log_is_mirrored_while_it_is_open(world: World) -> None:
    """TensorBoard keeps its event file open as long as the training lasts."""
    node = world.node("node", "--loose-interval", "0.2")
    (node.mnt / "run").mkdir()
    with (node.mnt / "run" / "events.out.tfevents.1").open("wb", buffering=0) as log:
        for number in range(3):
            log.write(b"line %d\n" % number)
            whole = b"".join(b"line %d\n" % one for one in range(number + 1))
            await_condition(
                lambda: world.bucket.keys("runs/run/loose/") and mirrored(world) == whole,  # noqa: B023
                "the log is mirrored",
            )
