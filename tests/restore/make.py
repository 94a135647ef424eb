"""Manifests and their objects, made directly."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from cachefs.formats.codec import encode
from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Manifest, Order, Pin, Shard, tree_digest
from cachefs.formats.pointer import Pointer, Published
from cachefs.restore.reader import read_pointer
from cachefs.store.base import CREATE_ONLY, Condition
from cachefs.store.memory import MemoryStore

RUN = "exp/a"
KEYS = Keys("base")
PART = 8


def memory() -> MemoryStore:
    return MemoryStore("base", now=lambda: 0.0)


def shard(store: MemoryStore, path: str, data: bytes, **fields: Any) -> Shard:
    """Store a shard's object and return the shard."""
    cut = [data[at : at + PART] for at in range(0, len(data), PART)] or [b""]
    digests = [hashlib.sha256(part).digest() for part in cut]
    key = f"base/objects/{hashlib.sha256(path.encode() + data).hexdigest()[:12]}"
    info = store.head(key) or store.put(key, data, condition=CREATE_ONLY)
    made = Shard(
        paths=(path,),
        member="n1",
        pin=Pin(key=key, version_id=info.version_id, size=len(data), sha256=tree_digest(digests)),
        part_size=PART,
        parts=tuple(digest.hex() for digest in digests),
        mode=0o640,
        mtime_ns=1_700_000_000_123_456_789,
    )
    return msgspec.structs.replace(made, **fields)


def manifest(store: MemoryStore, files: Mapping[str, bytes], **fields: Any) -> Manifest:
    made = Manifest(
        run=RUN,
        generation="step-1",
        attempt="t1",
        kind="directory",
        order=Order(1, 1, 1),
        epoch=1,
        owner="n1/x",
        preset="auto",
        members=(),
        shards=tuple(shard(store, path, data) for path, data in files.items()),
        symlinks=(),
        directories=(),
        trackers=(),
        sealed_at="",
    )
    return msgspec.structs.replace(made, **fields)


def publish(store: MemoryStore, step: int, *, generation: str = "", run: str = RUN, **changes: Any) -> Published:
    """Write a manifest and move the pointer to it; returns what the pointer names now."""
    attempt = f"t{step}"
    order = Order(step, 1, 1)
    name = generation or f"step-{step}"
    made = manifest(store, {"a": b"%d" % step}, run=run, generation=name, attempt=attempt, order=order)
    body = encode(made)
    key = KEYS.manifest(run, attempt, opened=1, sealed=1)
    info = store.put(key, body, condition=CREATE_ONLY)
    pin = Pin(key=key, version_id=info.version_id, size=len(body), sha256=hashlib.sha256(body).hexdigest())
    published = Published(generation=name, attempt=attempt, order=order, manifest=pin)
    move(store, run=run, **{"kind": "promote", "published": published, **changes})
    return published


def move(store: MemoryStore, *, run: str = RUN, **changes: Any) -> None:
    """Write the next version of the pointer."""
    seen = read_pointer(store, KEYS, run)
    seq = seen.pointer.seq + 1 if seen else 1
    old = seen.pointer if seen else Pointer(run=run, kind="grant", seq=0, epoch=1, owner="n1/x", nonce="", at="")
    new = msgspec.structs.replace(
        old, **{"seq": seq, "nonce": f"n{seq}", "prev": seen.prev if seen else None, **changes}
    )
    condition = Condition(if_match=seen.etag) if seen else CREATE_ONLY
    store.put(KEYS.pointer(run), encode(new), condition=condition)
