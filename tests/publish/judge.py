"""What must hold after every effect on the store and on a journal, whatever happened.

The bytes of each file name the member, the training's save and the file, so a mixture of two saves, or a part of one,
shows in what a published manifest pins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cachefs.errors import CorruptError
from cachefs.formats.codec import decode
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Manifest, MemberReport, Open, Pin, TestEvidence, tree_digest
from cachefs.formats.pointer import Pointer, Prev, Published
from cachefs.formats.records import AttemptRecord, State
from cachefs.store.base import Buffer, Condition, ObjectInfo
from cachefs.store.memory import MemoryStore

KEYS = Keys()


class Violation(AssertionError):
    """An invariant does not hold."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass
class Save:
    """One save of the training: `parts` are the files each member writes; `marked` once its signal may appear."""

    number: int
    generation: str
    parts: dict[str, int]
    marked: bool = False


def content(member: str, save: int, file: int) -> bytes:
    """Return the bytes of a file."""
    return f"{member} {save} {file} of the training".encode()


class Watched(MemoryStore):
    """Tells the judge of what lands, and of versions that are read."""

    def __init__(self, judge: Judge) -> None:
        super().__init__(now=lambda: 0.0)
        self._judge = judge

    def put(
        self,
        key: str,
        body: Buffer,
        *,
        condition: Condition | None,
        sha256: bytes | None = None,
        metadata: Mapping[str, str] = {},
    ) -> ObjectInfo:
        info = super().put(key, body, condition=condition, sha256=sha256, metadata=metadata)
        self._judge.watch(self._judge.landed, info, bytes(body), condition)
        return info

    def get_stream(self, key: str, version_id: str) -> Any:
        self._judge.reads[key, version_id] = self._judge.effects
        return super().get_stream(key, version_id)

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        self._judge.reads[key, version_id] = self._judge.effects
        return super().get_range(key, version_id, offset, length)

    def delete_version(self, key: str, version_id: str) -> None:
        self._judge.watch(must, False, f"I15: {key} was deleted")

    def probe_delete(self, key: str) -> None:
        self._judge.watch(must, False, f"I15: {key} was deleted")


@dataclass
class Judge:
    """Keeps the history of one run and checks each step of it. The first violation is kept, and ends the world."""

    run: str
    stop: Callable[[], None] = lambda: None
    violation: Violation | None = None
    saves: dict[int, Save] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By attempt of a member: what the training has written into it."""
    history: list[tuple[Pointer, ObjectInfo]] = field(default_factory=list)
    published: dict[str, tuple[Published, Manifest]] = field(default_factory=dict)
    effects: int = 0
    reads: dict[tuple[str, str], int] = field(default_factory=dict)
    """By version of an object: how many effects there had been when it was last read."""
    sealed: dict[Pin, int] = field(default_factory=dict)
    """By manifest: the same when it landed."""
    recorded: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.store = Watched(self)

    def watch(self, check: Callable[..., None], *args: Any) -> None:
        """Check; a violation is kept, so that no handler of the code under test can swallow it."""
        try:
            check(*args)
        except (Violation, CorruptError) as error:
            if self.violation is None:
                self.violation = error if isinstance(error, Violation) else Violation(str(error))
            self.stop()

    # the store

    def landed(self, info: ObjectInfo, body: bytes, condition: Condition | None) -> None:
        """A write has landed."""
        self.effects += 1
        must(condition is not None, f"I2: {info.key} was written without a condition")
        if info.key == KEYS.pointer(self.run):
            self._pointer(info, body)
            return
        versions = [one for one in self.store.list_versions(info.key) if one.key == info.key]
        must(len(versions) == 1, f"I1: {info.key} was written twice")
        if info.key.rpartition("/")[2].startswith("manifest"):
            pin = Pin(info.key, info.version_id, info.size, hashlib.sha256(body).hexdigest())
            self.sealed[pin] = self.effects

    def _pointer(self, info: ObjectInfo, body: bytes) -> None:
        new = decode(body, Pointer, info.key)
        must(info.etag not in {old.etag for _, old in self.history}, "I8: a pointer body was written twice")
        if not self.history:
            must((new.seq, new.epoch, new.kind, new.prev) == (1, 1, "grant", None), "I6: a run starts with a grant")
        else:
            self._follows(*self.history[-1], new)
        owners = {pointer.owner for pointer, _ in self.history if pointer.kind == "grant"}
        must(new.kind != "grant" or new.owner not in owners, "I9: a process took a second epoch")
        self.history.append((new, info))

    def _follows(self, old: Pointer, info: ObjectInfo, new: Pointer) -> None:
        must(new.seq == old.seq + 1, "I6: seq rises by one")
        must(new.prev == Prev(info.etag, info.version_id, old.seq), "I6: the chain is whole")
        if new.kind == "grant":
            must(new.epoch == old.epoch + 1, "I6: each grant takes the next epoch")
        else:
            must((new.epoch, new.owner) == (old.epoch, old.owner), f"I7: {new.kind} after a later grant")
        listed, before = [one.attempt for one in new.open], [one.attempt for one in old.open]
        gone = set(before) - set(listed)
        must(not set(listed) & set(self.published), "published and listed as open")
        if new.kind == "promote":
            self._promoted(old, new)
            must(gone == {new.published.attempt if new.published else ""}, "a promotion ends one attempt")
        else:
            must(new.published == old.published, f"{new.kind} publishes something")
            must(new.kind != "grant" or new.open == old.open, "a grant ends nothing")
        must(set(listed) <= set(before) or new.kind == "open", f"{new.kind} opens something")

    def _promoted(self, old: Pointer, new: Pointer) -> None:
        published = new.published
        if published is None:
            raise Violation("a promotion publishes something")
        must(published.attempt not in self.published, "an attempt was published twice")
        must(old.published is None or published.order > old.published.order, "I13: the order rises")
        manifest = decode(self._pinned(published.manifest), Manifest, published.manifest.key)
        named = (manifest.run, manifest.attempt, manifest.generation, manifest.order)
        must(named == (self.run, published.attempt, published.generation, published.order), "another manifest")
        must((manifest.epoch, manifest.owner) == (new.epoch, new.owner), "I7: sealed under another epoch")
        self._complete(manifest)
        self._tested(published.manifest, manifest)
        self._one_save(manifest)
        self.published[published.attempt] = (published, manifest)

    def _pinned(self, pin: Pin) -> bytes:
        found = self.store.get(pin.key, pin.version_id)
        if found is None or len(found[1]) != pin.size:
            raise Violation(f"I3: {pin.key} is not what was pinned")
        return found[1]

    def _small(self, key: str, kind: type[Any]) -> Any:
        found = self.store.get(key)
        if found is None:
            raise Violation(f"{key} is not there")
        return decode(found[1], kind, key)

    def _complete(self, manifest: Manifest) -> None:
        opened: Open = self._small(KEYS.open(self.run, manifest.attempt), Open)
        named = [entry.member for entry in manifest.members]
        must(len(named) == len(set(named)) == opened.count, f"I16: {named} of {opened.count} members")
        must(not opened.members or sorted(named) == sorted(opened.members), f"I16: {named}, not {opened.members}")
        reported = set()
        for entry in manifest.members:
            report = decode(self._pinned(entry.pin), MemberReport, entry.pin.key)
            must(not report.error and report.member == entry.member, f"I16: the report of {entry.member}")
            reported |= {shard.pin for shard in report.shards}
        must(reported == {shard.pin for shard in manifest.shards}, "I16: other shards than were reported")

    def _tested(self, pin: Pin, manifest: Manifest) -> None:
        key = KEYS.test(self.run, manifest.attempt, opened=manifest.order.epoch, sealed=manifest.epoch)
        evidence: TestEvidence = self._small(key, TestEvidence)
        must(evidence.manifest == pin, "I5: another manifest was tested")
        for shard in manifest.shards:
            read = self.reads.get((shard.pin.key, shard.pin.version_id), -1)
            must(read >= self.sealed[pin], f"I5: {shard.pin.key} was not read back")

    def _one_save(self, manifest: Manifest) -> None:
        files: dict[str, set[str]] = {}
        saves: set[int] = set()
        for shard in manifest.shards:
            body = self._pinned(shard.pin)
            cut = [body[at : at + shard.part_size] for at in range(0, len(body), shard.part_size)]
            digests = [hashlib.sha256(part).digest() for part in cut]
            must(tree_digest(digests) == shard.pin.sha256, f"I3: {shard.pin.key} does not verify")
            member, save, file, *_ = body.decode().split()
            must(shard.paths == (f"{member}-{file}",) and member == shard.member, f"{shard.paths} is {body!r}")
            files.setdefault(member, set()).add(file)
            saves.add(int(save))
        must(len(saves) == 1, f"a mixture of saves {sorted(saves)} was published as {manifest.generation}")
        save_of = self.saves[saves.pop()]
        must(save_of.generation == manifest.generation, "published under another name")
        must(save_of.marked, f"save {save_of.number} was published before it was whole")
        whole = {member: {str(file) for file in range(count)} for member, count in save_of.parts.items()}
        must(files == whole, f"save {save_of.number} was published with {files} of {whole}")

    # journals

    def journaled(self, member: str, record: AttemptRecord) -> None:
        """A member has recorded something about an attempt."""
        if record.state is not State.PUBLISHED or (member, record.attempt) in self.recorded:
            return
        self.recorded.add((member, record.attempt))
        must(record.key in self.published, f"{member} calls {record.generation} published, and no pointer named it")
        if not record.foreign:
            manifest = self.published[record.key][1]
            theirs = {s.paths[0]: self._pinned(s.pin) for s in manifest.shards if s.member == member}
            ours = self.files.get(record.attempt, {})
            must(ours == theirs, f"I19: {member} calls {record.generation} published: {ours}, not {theirs}")

    def ended(self, member: str, record: AttemptRecord) -> None:
        """Nothing can land any more: check what a member's journal says in the end."""
        if record.state is State.ABANDONED:
            must(record.key not in self.published, f"{member} calls {record.generation} abandoned; it was published")
