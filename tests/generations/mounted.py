"""A mount for the tests of the tracker: real journal, staging and pins; the tree is changed in place and told of."""

from __future__ import annotations

import os
import zipfile
from contextlib import ExitStack
from io import BytesIO

import trio

from cachefs.errors import StagingError
from cachefs.formats.keys import Keys
from cachefs.formats.records import AttemptRecord, State
from cachefs.generations import retrying
from cachefs.generations.catalog import AUTO
from cachefs.generations.detector import Detector
from cachefs.generations.placement import Placer
from cachefs.generations.releaser import Releaser
from cachefs.generations.tracked import Hints
from cachefs.generations.tracker import Tracker
from cachefs.journal import Journal
from cachefs.staging.changes import Change, Kind
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins
from tests.generations.fake_torch import metadata_pickle


def zipped(text: bytes) -> bytes:
    """Return a small zip, as torch.save writes one: the same bytes for the same text, whatever the clock says."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo("data"), text)
    return out.getvalue()


def metadata(*names: str) -> bytes:
    """Return a `.metadata` that lists shards."""
    return metadata_pickle([f"__{name}.distcp" for name in names])


class Mount:
    """Stands in for the mount: changes the tree and reports it, as mount/ does."""

    def __init__(self, root) -> None:
        self.stack = ExitStack()
        self.root = root
        self.start()

    def start(self, boot: str = "first boot") -> None:
        """Start, or start again after `die`."""
        self.staging = Staging(self.root)
        self.stack.callback(self.staging.close)
        self.journal = Journal(self.staging.journal)
        self.stack.callback(self.journal.close)
        self.pins = Pins(self.staging)
        self.hints: list[object] = []
        self.releaser = Releaser(self.journal, self.pins)
        placer = Placer(AUTO)
        self.tracker = Tracker(
            self.journal,
            self.pins,
            self.staging.tree_fd,
            Detector(placer),
            placer,
            Keys(),
            member="node",
            boot=boot,
            early_delay=0.0,
            hints=Hints(
                opened=lambda: self.hints.append("opened"),
                closed=lambda: self.hints.append("closed"),
                pinned=lambda: self.hints.append("pinned"),
                loose=self.hints.append,
            ),
        )

    def die(self) -> None:
        """Stop without a word, as kill -9 does."""
        self.stack.close()

    async def report(self, kind: Kind, path: str, **facts) -> None:
        waiting = self.tracker.after(Change(kind, path.encode(), **facts))
        if waiting is not None:
            await waiting

    async def held(self, kind: Kind, path: str) -> None:
        while (waiting := self.tracker.before(Change(kind, path.encode()))) is not None:
            await waiting

    async def write(self, path: str, data: bytes) -> None:
        file = self.staging.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = Kind.TRUNCATED if file.exists() else Kind.CREATED
        await self.held(kind, path)
        if kind is Kind.TRUNCATED:
            file.unlink()  # as the mount does with a pinned file: a fresh inode
        file.write_bytes(b"")
        await self.report(kind, path, writers=1)
        file.write_bytes(data)
        await self.report(Kind.CLOSED, path)

    async def rename(self, old: str, new: str) -> None:
        is_dir = (self.staging.tree / old).is_dir()
        os.rename(self.staging.tree / old, self.staging.tree / new)
        await self.report(Kind.RENAMED, new, old=old.encode(), is_dir=is_dir)

    async def remove(self, path: str) -> None:
        (self.staging.tree / path).unlink()
        await self.report(Kind.REMOVED, path)

    async def save(self, directory: str, **files: bytes) -> None:
        """Save as DCP does; the last rename closes."""
        for name, data in files.items():
            await self.write(f"{directory}/__{name}.distcp", data)
        await self.write(f"{directory}/.metadata.tmp", metadata(*files))
        await self.rename(f"{directory}/.metadata.tmp", f"{directory}/.metadata")

    def attempts(self) -> list[AttemptRecord]:
        with self.journal.read() as txn:
            return sorted(txn.attempts.scan(), key=lambda record: record.serial)

    def recorded(self, attempt: AttemptRecord) -> bool:
        """Return whether the journal has a shard of an attempt."""
        with self.journal.read() as txn:
            return bool(txn.shards_of(attempt.attempt))

    def pinned(self, attempt: AttemptRecord) -> dict[str, bytes]:
        """Return what is pinned, by the paths of the shard records."""
        with self.journal.read() as txn:
            shards = txn.shards_of(attempt.attempt)
        assert {shard.shard for shard in shards} == self.pins.shards(attempt.attempt)
        return {
            path: self.pins.path(attempt.attempt, shard.shard).read_bytes() for shard in shards for path in shard.paths
        }


class Full:
    """Makes the journal refuse what is written while `full` is set."""

    def __init__(self, mount: Mount, monkeypatch) -> None:
        self.full = False
        self.refused = trio.Event()
        write = mount.journal.write

        async def refuse(fn):
            await trio.lowlevel.checkpoint()
            if self.full:
                self.refused.set()
                raise StagingError("the journal cannot be written: disk full")
            return await write(fn)

        monkeypatch.setattr(mount.journal, "write", refuse)
        monkeypatch.setattr(retrying, "FIRST", 0.01)

    async def refuses(self) -> None:
        """Wait until a write is refused."""
        self.refused = trio.Event()
        with trio.fail_after(30):
            await self.refused.wait()


def publish_all(txn):
    """Leave the journal as it is when every attempt has been published."""
    for attempt in txn.attempts.scan():
        for shard in txn.shards_of(attempt.attempt):
            txn.drop_shard(shard)
        txn.update_attempt(attempt.attempt, state=State.PUBLISHED)
