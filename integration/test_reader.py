"""A reader that follows the pointers without pause, while two members save and are killed again and again.

Whatever it sees at any moment must be one whole save: exactly the files of one step, of both members, with their bytes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cachefs.store.base import ObjectStore
from cachefs.store.open import open_store
from integration.bucket import Bucket
from integration.node import Node, await_condition
from integration.world import QUICK, index, status, tensors, write

pytestmark = [pytest.mark.mount, pytest.mark.timeout(600)]

RUNS = 10
STEPS = 20
KILLS = 8
PAUSE = 0.001
"""Seconds between two looks: a processor is left to the daemons."""
MARKER = "model.safetensors.index.json"


class Store(Bucket):
    """A directory store as the reader sees it: an object's bytes by key and version, nothing else."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(None, "")
        self._store = store

    def get(self, key: str, version: str | None = None) -> bytes:
        found = self._store.get(key, version)
        if found is None:
            raise FileNotFoundError(key)
        return found[1]


def content(run: str, step: int) -> dict[str, bytes]:
    """Return the files of a save."""
    files = {f"model-{name}.safetensors": tensors(500, f"{run} {step} {name}") for name in "ab"}
    return files | {MARKER: json.dumps({"metadata": [run, step], **json.loads(index(sorted(files)))}).encode()}


class Reader:
    """Reads all pointers again and again in a thread of its own, and verifies what they name."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.looks = 0
        self.seen: Counter[str] = Counter()
        """By run: how many published generations were seen and verified."""
        self.newest: dict[str, int] = {}
        """By run: the step of the newest one."""
        self._sequence: dict[str, int] = {}

    def look(self, run: str) -> None:
        """Read a pointer; verify every version of it that is new."""
        try:
            pointer = self.bucket.pointer(run)
        except FileNotFoundError:
            assert run not in self._sequence, f"the pointer of {run} is gone"
            return
        self.looks += 1
        before = self._sequence.get(run, 0)
        assert pointer["seq"] >= before, f"the pointer of {run} went back"
        if pointer["seq"] == before:
            return
        self._sequence[run] = pointer["seq"]
        if pointer["published"] is not None:
            self.verify(run, pointer)

    def verify(self, run: str, pointer: dict[str, Any]) -> None:
        """Read what a pointer names, by its pins."""
        step = int(pointer["published"]["generation"].removeprefix("step-"))
        assert self.bucket.named(pointer) == content(run, step), f"{run}/step-{step} is not one save"
        assert step >= self.newest.get(run, 0)
        self.seen[run] += step > self.newest.get(run, 0)
        self.newest[run] = step

    @contextmanager
    def following(self, runs: list[str]) -> Iterator[None]:
        """Look at the runs without pause until the block ends."""
        ended = threading.Event()
        failed: list[BaseException] = []

        def follow() -> None:
            try:
                for run in itertools.cycle(runs):
                    if ended.wait(PAUSE):
                        break
                    self.look(run)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        if failed:
            raise failed[0]


def kill(one: Node, chance: random.Random) -> None:
    """Kill a daemon and start it again, or only its engine, which the daemon starts again."""
    assert one.process is not None
    children = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
    if chance.random() < 0.3 and children:
        os.kill(int(children[0]), signal.SIGKILL)
    else:
        one.kill()
        one.start()


def test_a_reader_never_sees_half_a_save(tmp_path: Path) -> None:
    """200 saves in ten runs, and kills at moments that the seed chooses."""
    (tmp_path / "store").mkdir()
    chance = random.Random(20)
    url = f"file://{tmp_path}/store"
    nodes = [Node(tmp_path / name, url, options=("--member", name, "--members", "a,b", *QUICK)) for name in "ab"]
    store = open_store(url, endpoint_url=None, region=None, connections=1)
    runs = [f"run-{number}" for number in range(RUNS)]
    reader = Reader(Store(store))
    saves = [(run, step) for step in range(1, STEPS + 1) for run in runs]
    kills = set(chance.sample(range(5, 2 * len(saves)), KILLS))
    moment = itertools.count()
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Node.start, nodes))
        with reader.following(runs):
            for run, step in saves:
                files = content(run, step)
                for one in nodes:
                    name = f"model-{one.root.name}.safetensors"
                    write(one.mnt / run / f"step-{step}" / name, files[name])
                    if next(moment) in kills:
                        kill(chance.choice(nodes), chance)
                write(chance.choice(nodes).mnt / run / f"step-{step}" / MARKER, files[MARKER])
                if run == runs[-1]:
                    await_condition(lambda: pending(nodes[0]) < 3 * RUNS, "the backlog is small")
            for run in runs:
                last(nodes, run, reader)
    finally:
        for one in nodes:
            one.end()
    published = sum(reader.seen.values())
    print(f"{len(saves)} saves, {KILLS} kills, {reader.looks} looks, {published} generations verified")
    assert published > len(saves) / 2
    for one in nodes:
        assert "Traceback" not in one.logged()


def pending(one: Node) -> int:
    """Return how many closed saves are not published yet."""
    return sum(entry["state"] in ("staged", "flushed", "sealed", "tested") for entry in status(one)["generations"])


def last(nodes: list[Node], run: str, reader: Reader) -> None:
    """Save once more without a kill: it is published, whatever became of those before."""
    step = STEPS + 1
    files = content(run, step)
    for one in nodes:
        name = f"model-{one.root.name}.safetensors"
        write(one.mnt / run / f"step-{step}" / name, files[name])
    write(nodes[1].mnt / run / f"step-{step}" / MARKER, files[MARKER])
    await_condition(lambda: reader.newest.get(run) == step, f"the last save of {run} is published")
