"""The restore test of several members: each reads what others wrote, and says so; the owner collects the answers.

A node that reads its own shards back proves less: its own page cache, route and clock may agree with it. A member that
gives no answer costs time, not the save: the owner reads its share then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import trio

from cachefs import clock
from cachefs.errors import CorruptError
from cachefs.formats.codec import decode
from cachefs.formats.manifest import Manifest, MemberTest, Pin, Shard
from cachefs.publish import sealing
from cachefs.publish.joining import shares
from cachefs.publish.pace import busy, pace
from cachefs.publish.restoretest import read_back
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes

PATIENCE = 4.0
"""Polls that the owner waits for a member's share at least; and twice as long as its own took."""


async def read_share(writes: Writes, manifest: Manifest, settings: Settings, pin: Pin) -> MemberTest:
    """Read and hash what `shares` gives to this member; return the evidence, which names what was wrong.

    Raises the store's errors when nothing is known.
    """
    mine = shares(manifest).get(settings.member, ())
    error = ""
    try:
        await _read(writes, manifest, mine, settings)
    except CorruptError as wrong:
        error = str(wrong)
    return sealing.member_test(
        manifest, pin, mine, level=settings.level, member=settings.member, error=error, at=clock.timestamp()
    )


async def share_test(writes: Writes, manifest: Manifest, pin: Pin, settings: Settings) -> Sequence[str]:
    """Run the restore test of a manifest together with its other members; return who read a share of it.

    Raises CorruptError when any of them found it bad, and the store's errors.
    """
    parts = shares(manifest)
    if set(parts) <= {settings.member}:
        await _read(writes, manifest, manifest.shards, settings)
        return ()
    began = trio.current_time()
    mine = parts.pop(settings.member, ())
    await _read(writes, manifest, mine, settings)
    patience = max(pace(len(parts), PATIENCE * settings.poll), 2 * (trio.current_time() - began))
    testers = await _answers(writes, manifest, pin, set(parts), patience=patience, poll=settings.poll)
    for silent in sorted(set(parts) - testers):
        await _read(writes, manifest, parts[silent], settings)
    return sorted(testers | {settings.member})


async def _read(writes: Writes, manifest: Manifest, shards: Sequence[Shard], settings: Settings) -> None:
    part = msgspec.structs.replace(manifest, shards=tuple(shards))
    await read_back(writes, part, settings.bytes_level, workers=settings.workers, ranges=settings.ranges)


async def _answers(
    writes: Writes, manifest: Manifest, pin: Pin, others: set[str], *, patience: float, poll: float
) -> set[str]:
    """Wait for the evidence of other members; return whose came."""
    keys, came = writes.keys, set[str]()
    prefix = keys.tests(manifest.run, manifest.attempt, manifest.epoch)
    deadline = trio.current_time() + patience
    while True:
        listing = await writes.read(writes.store.list, prefix)
        for key in listing.keys:
            member = keys.name_of(key)
            if member in others - came:
                found = await writes.read(writes.store.get, key)
                if found is None:
                    continue
                answer = decode(found[1], MemberTest, key)
                if answer.manifest != pin:
                    raise CorruptError(f"member {member} has tested another manifest than {pin.key}")
                if answer.error:
                    raise CorruptError(f"member {member}: {answer.error}")
                came.add(member)
        if came == others or trio.current_time() >= deadline:
            return came
        await trio.sleep(clock.jitter(busy(len(others), poll)))
