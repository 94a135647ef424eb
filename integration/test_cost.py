"""How many requests a save costs: what the fault proxy counts, and the formulas of the table in the documents."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from integration.node import Node
from integration.proxy import Request
from integration.world import MIB, PART, World, await_state, index, write

pytestmark = [pytest.mark.mount, pytest.mark.server]

MARKER = "model.safetensors.index.json"


def formula(members: int, owners: int, others: int, parts: int = 0, large: int = 0) -> Counter[str]:
    """Return the requests of one save, by what they are.

    `owners` and `others` are the files of the owner and of the other members that fit in one part; the owner's includes
    the marker. `large` files, all of the owner, have `parts` parts each. For files whose check reads once, like these.
    """
    small = owners + others
    return Counter(
        {
            "PutObject shard": small,
            "CreateMultipartUpload shard": large,
            "UploadPart shard": large * parts,
            "CompleteMultipartUpload shard": large,
            "PutObject open.json": 1,
            "PutObject close.json": 1,
            "PutObject report": members,
            "PutObject manifest.json": 1,
            "PutObject share.json": members - 1,
            "PutObject test.json": 1,
            "PutObject pointer.json": 2,
            "GetObject open.json": members,
            "GetObject report": 2 * members if members > 1 else 1,
            "GetObject manifest.json": members,
            "GetObject share.json": members - 1,
            # The restore test, the check of what is stored, and at the seal that of what is not on this node's disk.
            "HeadObject shard": small + large,
            "GetObject shard": (small + large * parts) + (small + large) + others,
        }
    )


def table() -> str:
    """Return the table of the documents."""
    rows = ["| members | files | parts each | PUT, POST | GET, HEAD |", "|---|---|---|---|---|"]
    for members, small, large, parts in (
        (1, 1, 0, 0),
        (1, 8, 8, 100),
        (3, 24, 0, 0),
        (8, 8, 8, 1000),
        (512, 512, 0, 0),
    ):
        found = formula(members, small // members, small - small // members, parts, large)
        writes = sum(count for name, count in found.items() if not name.startswith(("Get", "Head")))
        reads = sum(count for name, count in found.items() if name.startswith(("Get", "Head")))
        files = f"{small} small" + (f", {large} large" if large else "")
        rows.append(f"| {members} | {files} | {parts or 1} | {writes:,} | {reads:,} |")
    return "\n".join(rows)


def counted(requests: list[Request]) -> Counter[str]:
    """Return the requests that had an effect, by what they are; not those that only look whether something came."""
    found: Counter[str] = Counter()
    for request in requests:
        _, _, inside = request.key.partition("/attempts/")
        name = request.key.rpartition("/")[2]
        if "/shards/" in inside:
            name = "shard"
        elif "/members/" in inside:
            name = "report"
        elif "/tests/" in inside:
            name = "share.json"
        looks = request.operation == "GetObject" and name in ("pointer.json", "close.json")
        if request.effect in (200, 206) and not looks and not (request.method == "HEAD" and name != "shard"):
            found[f"{request.operation} {name}"] += 1
    return found


def save(nodes: list[Node], place: str, small: int, large: int) -> None:
    """Write a save: small files on all nodes in turn, large ones and the marker on the first."""
    names = [f"s{number}.bin" for number in range(small)]
    for number, name in enumerate(names):
        write(nodes[number % len(nodes)].mnt / place / name, name.encode() * 100)
    for number in range(large):
        names.append(f"l{number}.bin")
        write(nodes[0].mnt / place / names[-1], os.urandom(2 * PART + MIB))
    write(nodes[0].mnt / place / MARKER, index(names))
    for one in nodes:
        await_state(one, place)


@pytest.mark.parametrize("members", [1, 3])
def test_requests_of_a_save(world: World, members: int) -> None:
    """Exactly those of the formulas, once the run is owned."""
    names = "abc"[:members]
    nodes = world.members(",".join(names)) if members > 1 else [world.node("a")]
    save(nodes, "run/step-1", members, 0)
    for step, (small, large) in enumerate([(members, 0), (3 * members, 0), (members, 2)], 2):
        world.proxy.forget()
        save(nodes, f"run/step-{step}", small, large)
        others = small - small // members
        expected = formula(members, small // members + 1, others, parts=3, large=large)
        assert counted(world.proxy.requests("", "/runs/")) == +expected
        refused = [request for request in world.proxy.requests("PutObject", "/runs/") if request.effect == 412]
        assert {request.key.rpartition("/")[2] for request in refused} <= {"close.json"}  # two saw the signal
        assert len(refused) <= 2 * (members - 1)
    for one in nodes:
        assert one.stop() == 0


def test_the_table_is_that_of_the_formulas() -> None:
    """The README does not rot."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    found = re.search(r"<!-- requests -->\n(.*?)\n<!-- /requests -->", readme, re.DOTALL)
    assert found
    assert found[1].strip() == table()
