"""What an upload writes into the journal: one function for each transaction.

Each looks first whether the journal still wants the upload: a file of an open save may be dropped at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from cachefs.errors import CorruptError
from cachefs.flush import plan
from cachefs.formats.manifest import Pin
from cachefs.formats.records import AttemptRecord, PartRecord, ShardRecord, State
from cachefs.journal import Txn


class Dropped(Exception):
    """The journal does not want this upload any more; whatever was sent is to be thrown away."""


class Sent(msgspec.Struct, frozen=True):
    """A proved object version, and what was hashed on the way. `xxh3` is of the whole file, hex."""

    pin: Pin
    digests: tuple[bytes, ...]
    xxh3: str


def current(txn: Txn, record: ShardRecord) -> ShardRecord:
    """Return the record of an upload as it is now. Raises Dropped when the journal wants something else."""
    found = txn.shard(record.attempt, record.shard)
    attempt = txn.attempts.get(record.attempt)
    if found is None or attempt is None or not plan.uploads(attempt, txn.runs.get(attempt.run)):
        raise Dropped
    if not plan.same_upload(found, record):
        raise Dropped
    return found


def forget(record: ShardRecord, txn: Txn) -> None:
    """Forget an upload that was aborted, where the file may be sent again: a fenced run may be taken back."""
    found = txn.shard(record.attempt, record.shard)
    if found is not None and found.upload_id == record.upload_id:
        txn.drop_parts(found)
        txn.put_shard(msgspec.structs.replace(found, upload_id=""))


def fit(
    records: Iterable[ShardRecord], part_size: int, key: Callable[[AttemptRecord, ShardRecord], str], txn: Txn
) -> None:
    """Fix the part sizes and keys. From then on every try makes the same digests and objects, whatever the settings
    become.
    """
    for record in records:
        found = txn.shard(record.attempt, record.shard)
        attempt = txn.attempts.get(record.attempt)
        if found is not None and attempt is not None and not found.part_size:
            fitted = plan.fit_part_size(found.identity.size, part_size)
            txn.put_shard(msgspec.structs.replace(found, part_size=fitted, key=key(attempt, found)))


def change(record: ShardRecord, retries: int, changes: dict[str, Any], txn: Txn) -> None:
    """Change fields of a shard and count retries; with the upload id its parts go. Raises Dropped."""
    found = current(txn, record)
    if "upload_id" in changes:
        txn.drop_parts(found)
    txn.put_shard(msgspec.structs.replace(found, retries=found.retries + retries, **changes))


def acknowledge(record: ShardRecord, part: PartRecord, txn: Txn) -> None:
    """Record a part that the store has. Raises Dropped."""
    found = current(txn, record)
    if found.upload_id != part.upload_id:
        raise Dropped
    txn.put_part(found, part)
    if found.error:
        txn.put_shard(msgspec.structs.replace(found, error=""))


def prove(record: ShardRecord, sent: Sent, last: bool, txn: Txn) -> bool:
    """Record the proof that the store has the shard; return whether that made its attempt flushed.

    `last` asks for that look at all shards. Raises Dropped, and CorruptError when the hash of the file, filled in
    meanwhile, is another.
    """
    found = current(txn, record)
    if found.identity.xxh3 not in (None, sent.xxh3):
        raise CorruptError(
            f"{found.paths[0]} changed in staging after its save closed: hash {sent.xxh3}, it was {found.identity.xxh3}"
        )
    txn.drop_parts(found)
    identity = msgspec.structs.replace(found.identity, xxh3=sent.xxh3)
    txn.put_shard(
        msgspec.structs.replace(found, identity=identity, digests=sent.digests, pin=sent.pin, upload_id="", error="")
    )
    return last and settle(record.attempt, txn)


def settle(name: str, txn: Txn) -> bool:
    """Make a staged attempt flushed if all of it is in the store; return whether it became so."""
    attempt = txn.attempts.get(name)
    if attempt is None or not plan.flushed(attempt, txn.shards_of(name)):
        return False
    txn.update_attempt(name, state=State.FLUSHED, error="")
    return True


def settle_all(names: Iterable[str], txn: Txn) -> None:
    """Settle several attempts."""
    for name in names:
        settle(name, txn)


def abandon(record: ShardRecord, error: str, txn: Txn) -> None:
    """End the attempt of a shard whose bytes must not be published. Raises Dropped."""
    found = current(txn, record)
    txn.put_shard(msgspec.structs.replace(found, error=error))
    txn.update_attempt(record.attempt, state=State.ABANDONED, error=error)
