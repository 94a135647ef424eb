"""Files that are written through maps whose descriptors are closed, on both data paths: no save closes under them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.node import await_condition
from integration.posix import put
from integration.world import await_state, published, states, tensors

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, and the kernel data path needs root"),
]
SIZE = 10_000


class Mapping:
    """A process that writes through a map; see scripts/mapping.py."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("scripts") / "mapping.py"), str(path), str(SIZE)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answered()

    def _answered(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self._answered()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def mapping() -> Iterator[Callable[[Path], Mapping]]:
    with ExitStack() as stack:

        def start(path: Path) -> Mapping:
            one = Mapping(path)
            stack.callback(one.end)
            return one

        yield start


@pytest.mark.parametrize("how", ["written under its name", "renamed into place", "one of many files"])
def test_a_save_waits_for_a_map_of_its_file_and_publishes_what_the_map_wrote(mounted, mnt, mapping, how):
    """Its descriptor was closed long ago: another save, whole at that time, is published meanwhile."""
    path = mnt / "x.pt"
    if how == "renamed into place":
        training = mapping(mnt / "x.pt.tmp")
        os.rename(mnt / "x.pt.tmp", path)
    elif how == "one of many files":
        path = mnt / "checkpoint-7"
        path.mkdir()
        training = mapping(path / "optimizer.pt")
        (path / "model.safetensors").write_bytes(tensors(1000))
        put(path / "trainer_state.json", b"{}")
    else:
        training = mapping(path)
    training.ask("first")
    clock = mounted.mnt / f"clock of {mnt.name}"
    clock.mkdir()
    put(clock / "x.pt", b"clock")
    await_state(mounted, f"{clock.name}/x.pt")
    training.ask("second")
    name = f"{mnt.name}/{path.name}"
    assert states(mounted, name) == ["open"]

    training.ask("unmap")
    mounted.wait(name)
    assert states(mounted, name) == ["published"]
    mapped = "optimizer.pt" if path.is_dir() else ""
    assert published(mounted, mnt.name, path.name, mapped) == b"second\n".ljust(SIZE, b"\0")


def test_a_map_of_a_file_that_was_removed_ends_with_its_process(mounted, mnt, mapping):
    """Nobody waits for it, and its bytes are freed."""
    training = mapping(mnt / "x.pt")
    os.unlink(mnt / "x.pt")
    training.ask("still mine")
    training.end()
    assert mounted.process is not None
    fds = Path(f"/proc/{mounted.process.pid}/fd")

    def holds_it() -> bool:
        return any("x.pt (deleted)" in target for target in map(link_or_none, fds.iterdir()))

    await_condition(lambda: not holds_it(), "no descriptor of the removed file is left")


def link_or_none(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:
        return ""
