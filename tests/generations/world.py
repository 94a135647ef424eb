"""A visible tree in memory that reports its changes to a detector: the tests write as a framework would."""

from __future__ import annotations

import io
import json
import zipfile
from itertools import count

from cachefs.errors import CachefsError
from cachefs.formats.records import Baseline
from cachefs.generations.actions import (
    AbandonSave,
    Action,
    CancelSave,
    CloseSave,
    Incomplete,
    Loose,
    MoveSave,
    OpenSave,
)
from cachefs.generations.catalog import AUTO
from cachefs.generations.detector import Detector
from cachefs.generations.placement import Placer
from cachefs.generations.presets import Preset
from cachefs.staging.changes import Change, Kind


class Bytes:
    """A Source over bytes."""

    def __init__(self, data: bytes, error: CachefsError | None = None) -> None:
        self.data, self.error = data, error

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        if self.error is not None:
            raise self.error
        return self.data[offset : offset + length]


class Node:
    def __init__(self, ino: int, mtime: int, data: bytes = b"", target: bytes | None = None) -> None:
        self.ino, self.mtime, self.data, self.target, self.writers = ino, mtime, data, target, 0
        self.mapped = False
        """Whether a map of it is written past the mount."""


class Handle:
    """An open writable file. `close()` after any number of `write()`."""

    def __init__(self, world: World, node: Node) -> None:
        self.world, self.node = world, node
        node.writers += 1

    def write(self, data: bytes) -> Handle:
        self.node.data += data
        self.node.mtime = self.world.tick()
        return self

    def close(self) -> list[Action]:
        self.node.writers -= 1
        paths = [path for path, node in self.world.files.items() if node is self.node]
        if self.node.writers or not paths:
            return []
        return self.world.tell(Change(Kind.CLOSED, paths[0]))


class World:
    """The tree, its clock (`now`, seconds) and the detector. Every action is kept in `actions`, and reading a path of
    `unreadable` raises its error.
    """

    def __init__(self, presets=AUTO, **options) -> None:
        self.files: dict[bytes, Node] = {}
        self.unreadable: dict[bytes, CachefsError] = {}
        self.options = options
        self.presets = presets
        self.detector = Detector(Placer(presets), **options)
        self.now = 1000.0
        self.actions: list[Action] = []
        self._count = count(1)

    # ---- the View

    def source(self, path):
        node = self.files.get(path)
        return None if node is None or node.target is not None else Bytes(node.data, self.unreadable.get(path))

    def names(self, path):
        return sorted(name[len(path) + 1 :] for name in self.files if name.startswith(path + b"/"))

    def readlink(self, path):
        node = self.files.get(path)
        return None if node is None else node.target

    def written(self, path):
        return sorted(
            name for name, node in self.files.items() if node.mapped and (name + b"/").startswith(path + b"/")
        )

    def identity(self, path):
        node = self.files.get(path)
        return None if node is None else Baseline(node.ino, node.mtime, len(node.data))

    # ---- time and events

    def tick(self) -> int:
        return next(self._count)

    def tell(self, change: Change) -> list[Action]:
        found = self.detector.observe(change, self.now, self)
        self._check(found)
        return found

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass; the detector is asked at each of its deadlines."""
        end = self.now + seconds
        found: list[Action] = []
        while (deadline := self.detector.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            part = self.detector.due(self.now, self)
            self._check(part)
            found += part
        self.now = end
        return found

    def _check(self, found: list[Action]) -> None:
        self.actions += found
        for action in found:
            if isinstance(action, CloseSave):
                below = [path for path in self.files if path == action.path or path.startswith(action.path + b"/")]
                assert not any(self.files[path].writers for path in below), "closed with open writers"
                assert not any(self.files[path].mapped for path in below), "closed with maps that are written"

    # ---- what a program does

    def create(self, path: str, data: bytes = b"x") -> Handle:
        """open(O_WRONLY|O_CREAT|O_TRUNC) and write."""
        name = path.encode()
        node = self.files.get(name)
        kind = Kind.CREATED if node is None else Kind.TRUNCATED
        if node is None:
            node = self.files[name] = Node(self.tick(), self.tick())
        node.data = b""
        handle = Handle(self, node)
        self.tell(Change(kind, name))
        return handle.write(data)

    def reopen(self, path: str) -> Handle:
        """open(O_RDWR) without O_TRUNC."""
        handle = Handle(self, self.files[path.encode()])
        self.tell(Change(Kind.OPENED, path.encode()))
        return handle

    def put(self, path: str, data: bytes = b"x") -> None:
        self.create(path, data).close()

    def rename(self, old: str, new: str) -> None:
        a, b = old.encode(), new.encode()
        if a in self.files:
            node = self.files.pop(a)
            self.files[b] = node
            self.tell(Change(Kind.RENAMED, b, old=a, writers=node.writers))
            return
        for name in [name for name in self.files if name.startswith(a + b"/")]:
            self.files[b + name[len(a) :]] = self.files.pop(name)
        self.tell(Change(Kind.RENAMED, b, old=a, is_dir=True))

    def replace(self, path: str, data: bytes = b"x", temp: str = "{}.tmp") -> None:
        """Write a temporary name beside it and rename it."""
        self.put(temp.format(path), data)
        self.rename(temp.format(path), path)

    def link(self, old: str, new: str) -> None:
        self.files[new.encode()] = self.files[old.encode()]
        self.tell(Change(Kind.LINKED, new.encode(), old=old.encode()))

    def symlink(self, target: str, path: str) -> None:
        self.files[path.encode()] = Node(self.tick(), self.tick(), target=target.encode())
        self.tell(Change(Kind.SYMLINKED, path.encode(), target=target.encode()))

    def unlink(self, path: str) -> None:
        del self.files[path.encode()]
        self.tell(Change(Kind.REMOVED, path.encode()))

    def rmtree(self, path: str) -> None:
        for name in self.names(path.encode()):
            self.unlink(f"{path}/{name.decode()}")
        self.tell(Change(Kind.REMOVED, path.encode(), is_dir=True))

    # ---- what the detector said

    def of(self, kind) -> list:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def closes(self) -> list[tuple[str, str, int | None]]:
        return [(action.path.decode(), action.preset, action.step) for action in self.of(CloseSave)]

    @property
    def opens(self) -> list[str]:
        return [action.placement.path.decode() for action in self.of(OpenSave)]

    @property
    def cancels(self) -> list[str]:
        return [action.path.decode() for action in self.of(CancelSave)]

    @property
    def loose(self) -> list[str]:
        return [action.path.decode() for action in self.of(Loose)]

    @property
    def incomplete(self) -> list[str]:
        return [action.path.decode() for action in self.of(Incomplete)]

    @property
    def abandoned(self) -> list[tuple[str, str]]:
        return [(action.path.decode(), action.reason) for action in self.of(AbandonSave)]

    @property
    def moves(self) -> list[tuple[str, str]]:
        return [(action.old.decode(), action.placement.path.decode()) for action in self.of(MoveSave)]


def torch_zip(payload: bytes = b"weights" * 100) -> bytes:
    """Bytes laid out as torch.save writes them: stored members, directory last. The same at any time."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), b"\x80\x02}.")
        archive.writestr(zipfile.ZipInfo("archive/data/0"), payload)
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
    return out.getvalue()


def safetensors_bytes(size: int = 64) -> bytes:
    import numpy as np
    from safetensors.numpy import save

    return save({"w": np.arange(size, dtype=np.float32), "b": np.zeros(3, dtype=np.int8)}, metadata={"format": "pt"})


ZIP = torch_zip()
TENSORS = safetensors_bytes()
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()


def dcp_metadata(*names: str) -> bytes:
    """A DCP `.metadata` that lists shards, made by stand-ins for torch's classes (see fake_torch.py)."""
    from .fake_torch import metadata_pickle

    return metadata_pickle(names)


def dcp_save(world: World, path: str, ranks: int = 2, *, close: bool = True) -> None:
    """What DCP does in a directory, in its order (FileSystemWriter.write_data and finish)."""
    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    handles = [world.create(f"{path}/{name}") for name in names]
    for handle in handles:
        handle.close()
    if not close:
        return
    world.put(f"{path}/.metadata.tmp", dcp_metadata(*names))
    if f"{path}/.metadata".encode() in world.files:
        world.unlink(f"{path}/.metadata")
    world.rename(f"{path}/.metadata.tmp", f"{path}/.metadata")


def preset_fields(preset: Preset) -> dict[str, object]:
    """Return a built-in preset as a user would write it down, but for its name."""
    return {
        "pattern": preset.pattern,
        "close": [{"on": signal.on, "names": list(signal.names)} for signal in preset.close],
        "strength": preset.strength,
        "rank_files": list(preset.rank_files),
        "evidence": list(preset.evidence),
        "generic": preset.generic,
        "quiet": preset.quiet,
    }
