"""How often members look, and what that costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import trio

from cachefs.publish.pace import BUSY, JITTERED, LISTS, RATE, busy, pace
from tests.publish.cluster import Cluster
from tests.publish.stage import memory
from tests.store.faults import FaultyStore


@pytest.mark.parametrize(("members", "seconds"), [(1, 1.0), (3, 1.0), (37, 1.0), (75, 2.0), (512, 13.653)])
def test_members_of_a_busy_run_share_a_rate(members: int, seconds: float) -> None:
    """The default poll of 15 s plays no part while something is open."""
    assert busy(members, 15.0) == pytest.approx(seconds, abs=0.001)
    assert members / (busy(members, 15.0) * JITTERED) <= RATE + 0.001


def test_a_short_poll_is_a_bound_for_every_look() -> None:
    """Who asks for looks every 0.2 s gets them, while few share the rate."""
    assert busy(3, 0.2) == 0.2 < BUSY
    assert busy(75, 0.2) == 2.0
    assert pace(3, 15.0) == 15.0


async def test_the_looks_of_512_members(tmp_path: Path) -> None:
    """While a save is written, all members together ask for the pointer at most RATE times a second, and as often for
    the close record. They list the runs LISTS times, and here each time costs three requests: the run lies three deep.
    """
    members, seconds = 512, 60.0
    store = FaultyStore(memory())
    names = tuple(f"m{number}" for number in range(members))
    async with trio.open_nursery() as nursery:
        cluster = Cluster(tmp_path, store, nursery)
        for name in names:
            await cluster.add(name, owner=name == "m0", names=names, count=members)
        cluster.save("step-1", 1, m0={"a": b"bytes"})
        await trio.sleep(1.5 * members / LISTS)  # all have listed the runs, and know the attempt
        store.calls.clear()
        began = trio.current_time()
        await trio.sleep(seconds)
        assert trio.current_time() - began == seconds
        found = Counter((call.operation, call.key.rpartition("/")[2]) for call in store.calls)
        nursery.cancel_scope.cancel()
    for node in cluster.nodes.values():
        node.close()
    print(dict(found))
    least, most = 0.9 * RATE * seconds, 1.1 * RATE * seconds
    assert 0 < found["list", ""] < 2 * 3 * LISTS * seconds
    assert least < found["get", "pointer.json"] < most
    assert least < found["get", "close.json"] < most
