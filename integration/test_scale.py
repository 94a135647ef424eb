"""Ten thousand small files in one save: taken, pending at a start, published, within bounds that are stated here.

Run with `-s` to see the figures.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from integration.node import Node
from integration.world import index, status

pytestmark = [pytest.mark.mount, pytest.mark.timeout(600)]

FILES = 10_000
GENERATION = "run/step-1"
START_SECONDS = 5.0
"""From the start of the process until the mount serves, with all files pending."""
GROWTH_BYTES = 200 << 20
"""How much the daemon's memory may grow over an idle one's: 20 KiB for each file."""
PUBLISH_SECONDS = 180.0
"""From the start with all files pending to `published`."""


def content(number: int) -> bytes:
    """Return the bytes of a file: 1 to 4 KiB."""
    return number.to_bytes(4, "little") * (256 + number * 7 % 768)


def most_memory(one: Node) -> int:
    """Return the most resident memory that a daemon and its engine each ever had, together, in bytes."""
    assert one.process is not None
    pid = one.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = 0
    for each in (pid, *children):
        lines = Path(f"/proc/{each}/status").read_text().splitlines()
        found += next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return found


def figure(name: str, value: float, unit: str) -> None:
    print(f"{name}: {value:.1f} {unit}")


def test_ten_thousand_small_files(tmp_path: Path) -> None:
    """Taken while nothing is published, they are all pending when the daemon is killed; the next one serves at once,
    publishes every file, and stays small.
    """
    (tmp_path / "store").mkdir()
    one = Node(tmp_path / "node", f"file://{tmp_path}/store")
    try:
        one.start("--no-publish")
        idle = most_memory(one)
        names = [f"shard-{number:05d}.bin" for number in range(FILES)]
        directory = one.mnt / GENERATION
        directory.mkdir(parents=True)
        began = time.monotonic()
        for number, name in enumerate(names):
            (directory / name).write_bytes(content(number))
        figure("files written", FILES / (time.monotonic() - began), "files/s")
        began = time.monotonic()
        (directory / "model.safetensors.index.json").write_bytes(index(names))
        one.wait(GENERATION, "staged")
        figure("staged after close", time.monotonic() - began, "s")
        one.kill()

        began = time.monotonic()
        one.start()
        served = time.monotonic() - began
        figure("serves with all pending", served, "s")
        assert served < START_SECONDS
        assert status(one)["backlog_files"] > FILES // 2
        one.wait(GENERATION, "flushed", timeout=PUBLISH_SECONDS)
        figure("flushed", time.monotonic() - began, "s")
        one.wait(GENERATION, timeout=PUBLISH_SECONDS)
        took = time.monotonic() - began
        figure("published", took, "s")
        grown = most_memory(one) - idle
        figure("memory growth", grown / (1 << 20), "MiB")
        assert took < PUBLISH_SECONDS
        assert grown < GROWTH_BYTES
        assert one.stop() == 0
        one.wipe_staging()
        began = time.monotonic()
        out = one.restore("run", tmp_path / "out")
        figure("restored", time.monotonic() - began, "s")
        found = {path.name: path.read_bytes() for path in (out / "step-1").iterdir()}
        assert len(found) == FILES + 1
        assert [name for number, name in enumerate(names) if found[name] != content(number)] == []
    finally:
        one.end()
