"""A run under test: S3 server, fault proxy, bucket, and nodes that train and lose their disks."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachefs import control
from cachefs.formats.keys import Keys
from cachefs.restore import reader
from cachefs.restore.shards import read_shard
from cachefs.store.open import open_store
from integration.bucket import Bucket
from integration.machines import Machine, Switch
from integration.node import Node, await_condition
from integration.proxy import Proxy, Request
from tests.servers import Server
from tests.servers.ports import free_port

MIB = 1 << 20
PART = 5 * MIB
"""The part size of all nodes: the least that S3 allows."""
QUICK = ("--pointer-poll", "0.2", "--member-settle", "0.5", "--early-upload-delay", "0.1")
"""Options of members that wait for each other as little as they can."""
SHARD = "/shards/"
"""Found in the key of every shard, and of nothing else."""
POINTER = "/pointer.json$"


def tensors(size: int, seed: int | str = 0) -> bytes:
    """Return the bytes of a safetensors file with `size` bytes of numbers, different for each seed."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(size)


def index(names: list[str]) -> bytes:
    """Return the index of a Hugging Face save; torchtitan writes it last, so it closes the save."""
    return json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(names)}}).encode()


def write(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write a file as training code does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def save(directory: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Write a complete sharded save, `step-<n>`; return all its files."""
    for name, data in files.items():
        write(directory / name, data)
    last = {"model.safetensors.index.json": index(list(files))}
    for name, data in last.items():
        write(directory / name, data)
    return files | last


class World:
    """One bucket prefix behind one proxy; the nodes share both."""

    def __init__(
        self, server: Server, proxy: Proxy, root: Path, stack: ExitStack, switch: Switch | None = None
    ) -> None:
        self.proxy = proxy
        self.root = root
        self.switch = switch
        self._server = server
        self._stack = stack
        client = server.session().client("s3", endpoint_url=server.endpoint_url)
        stack.callback(client.close)
        self.bucket = Bucket(client, server.bucket(), "ckpt")

    def node(self, name: str = "node", *options: str, metrics: bool = False) -> Node:
        """Return a started node; `name` is its member name, too."""
        return self.place(name, *options, metrics=metrics).start()

    def place(self, name: str, *options: str, metrics: bool = False) -> Node:
        """Return a node that is not started."""
        if metrics:
            options += ("--metrics", f"127.0.0.1:{free_port()}")
        one = Node(
            self.root / name,
            f"s3://{self.bucket.bucket}/ckpt",
            options=("--endpoint-url", self.proxy.url, "--part-size", "5MiB", "--member", name, *options),
            environ=self._server.environ,
        )
        self._stack.callback(one.end)
        return one

    def machine(self, name: str, *options: str) -> Machine:
        """Return a machine of its own, switched off; the world has a `switch` then."""
        assert self.switch is not None
        one = Machine(
            self.switch,
            self.root,
            name,
            f"s3://{self.bucket.bucket}/ckpt",
            options=("--endpoint-url", self.proxy.url, "--part-size", "5MiB", *options),
            environ=self._server.environ,
        )
        self._stack.callback(one.end)
        return one

    def members(self, names: str, *options: str) -> list[Node]:
        """Return started nodes that save together, one member each; the first one owns the runs."""
        places = [self.place(name, "--members", names, *QUICK, *options) for name in names.split(",")]
        with ThreadPoolExecutor() as pool:
            return list(pool.map(Node.start, places))

    def enter(self, context: AbstractContextManager[Path]) -> Path:
        """Enter a context that ends when the nodes made after it have ended."""
        return self._stack.enter_context(context)

    def verify(self, one: Node, run: str, saved: dict[str, bytes]) -> None:
        """Lose the disk, and read what was saved from the bucket alone."""
        if one.process is not None:
            assert one.stop() == 0, one.logged()
        one.wipe_staging()
        assert_same(self.bucket.files(run), saved)
        history(self.bucket, run)


def contents(directory: Path) -> dict[str, bytes]:
    """Return a directory's files by relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def writes_pointer(kind: str) -> Callable[[Request], bool]:
    """Return the condition that a request writes a pointer of this kind, for Proxy.on."""
    return lambda request: (
        request.key.endswith("/pointer.json") and request.method == "PUT" and json.loads(request.body)["kind"] == kind
    )


def published(one: Node, run: str, generation: str, file: str = "") -> bytes:
    """Return the bytes of a file of a generation, or of a single-file generation, in a directory store."""
    store = open_store(one.store)
    shards = reader.load_manifest(store, run, reader.find(store, Keys(store.prefix), run, generation)).shards
    (shard,) = [shard for shard in shards if not file or file in shard.paths]
    found = bytearray()
    read_shard(store, shard, lambda _at, data: found.extend(data))
    return bytes(found)


def assert_same(found: dict[str, bytes], saved: dict[str, bytes]) -> None:
    """Compare two sets of files, without printing them."""
    assert sorted(found) == sorted(saved)
    assert [path for path in found if found[path] != saved[path]] == []


def assert_written_once(world: World) -> None:
    """Check that every object of the attempts has exactly one version."""
    keys = [key for key in world.bucket.keys("runs/") if "/attempts/" in key]
    assert [key for key in keys if SHARD in key]
    assert {key: len(world.bucket.versions(key)) for key in keys} == dict.fromkeys(keys, 1)


def history(bucket: Bucket, run: str) -> list[dict[str, Any]]:
    """Return all pointers of a run, the oldest first, after checking that they are one line: each names the version it
    replaced, seq rises by one, epochs by grants only, and no version stands outside the line.
    """
    key = f"{bucket.prefix}runs/{run}/pointer.json"
    versions = bucket.versions(key)  # the newest first; a write that comes later is not looked at
    walked, found = versions[:1], [json.loads(bucket.get(key, versions[0]))]
    while (prev := found[-1]["prev"]) is not None:
        walked.append(prev["version_id"])
        found.append(json.loads(bucket.get(key, prev["version_id"])))
    assert sorted(walked) == sorted(versions)
    line = found[::-1]
    assert [pointer["seq"] for pointer in line] == list(range(1, len(line) + 1))
    for older, newer in pairwise(line):
        granted = newer["kind"] == "grant"
        assert newer["epoch"] == older["epoch"] + granted
        assert granted or newer["owner"] == older["owner"]
    assert len({pointer["nonce"] for pointer in line}) == len(line)
    return line


@contextmanager
def build(server: Server, root: Path) -> Iterator[World]:
    """A world that leaves nothing behind."""
    with ExitStack() as stack:
        yield World(server, stack.enter_context(Proxy(server.endpoint_url)), root, stack)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world on moto, or on the server that `on_both` asks for."""
    with build(request.getfixturevalue(f"{getattr(request, 'param', 'moto')}_server"), tmp_path) as one:
        yield one


on_both = pytest.mark.parametrize("world", ["moto", "ministack"], indirect=True)
"""For tests that are worth their time on both servers, which differ (tests/store/backends.py)."""


def status(one: Node) -> dict[str, Any]:
    """Return the daemon's status; without a process for the command line it is quick enough to poll."""
    place = Path(os.fsdecode(os.getxattr(one.mnt, "user.cachefs.socket")))
    found: dict[str, Any] = msgspec.to_builtins(control.ask(place, control.StatusRequest()))
    return found


def attempts(one: Node, path: str) -> list[dict[str, Any]]:
    """Return the attempts of a generation, oldest first."""
    return [attempt for attempt in status(one)["generations"] if attempt["path"] == path]


def states(one: Node, path: str) -> list[str]:
    """Return the states of a generation's attempts, oldest first."""
    return [attempt["state"] for attempt in attempts(one, path)]


def await_state(one: Node, path: str, state: str = "published") -> None:
    """Wait until the newest attempt of a generation is in a state."""
    await_condition(lambda: states(one, path)[-1:] == [state], f"{path} is {state}")


def metric(one: Node, name: str, **labels: str) -> float:
    """Return the sum of a metric's series that have these labels; the node was made with `metrics=True`."""
    address = one.options[one.options.index("--metrics") + 1]
    with urlopen(f"http://{address}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
