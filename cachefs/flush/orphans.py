"""Uploads in progress that nobody will finish: begun by an earlier daemon of this member, and unknown to the journal
or of a save that came to its end. They cost money until they are aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cachefs.errors import UnavailableError
from cachefs.flush.plan import uploads
from cachefs.flush.shard import Doors
from cachefs.formats.keys import Keys
from cachefs.journal import Journal
from cachefs.store.base import UploadInfo

T = TypeVar("T")


def known_uploads(journal: Journal) -> set[str]:
    """Return the upload ids that will be taken up again; a fence of an earlier process ends with it."""
    with journal.read() as txn:
        return {
            shard.upload_id
            for attempt in txn.attempts.scan()
            if uploads(attempt, None)
            for shard in txn.shards_of(attempt.attempt)
            if shard.upload_id and shard.pin is None
        }


def known_runs(journal: Journal) -> list[str]:
    """Return the runs this journal knows: only there may uploads of this member's name be ours."""
    with journal.read() as txn:
        return sorted({run.run for run in txn.runs.scan()} | {attempt.run for attempt in txn.attempts.scan()})


class Orphans:
    """Finds and aborts the orphaned uploads of a run, before anything new of that run is begun."""

    def __init__(self, doors: Doors, keys: Keys, member: str) -> None:
        self._doors = doors
        self._keys = keys
        self._member = member

    async def find(self, run: str) -> list[UploadInfo]:
        """Return the orphans of a run; waits until the store answers.

        No upload of the run may be begun before this returns: the journal learns of one only after the store. Raises
        DeniedError, Unsupported and other refusals.
        """
        ours = "/{}/{}/".format(*self._keys.shard(run, "a", self._member, "s", "p").split("/")[-3:-1])
        found = await self._insist(run, self._doors.store.list_multiparts, self._keys.attempts(run))
        known = known_uploads(self._doors.journal)
        return [upload for upload in found if ours in upload.key and upload.upload_id not in known]

    async def abort(self, run: str, orphan: UploadInfo) -> None:
        """Abort one; waits until the store answers. Raises as `find`."""
        await self._insist(run, self._doors.store.abort_multipart, orphan.key, orphan.upload_id)

    async def _insist(self, run: str, request: Callable[..., T], *args: Any) -> T:
        while True:
            try:
                async with self._doors.lanes.slot(run):
                    return await self._doors.hop(request, *args)
            except UnavailableError as error:
                self._doors.failed(error)
                self._doors.lanes.failed(run)
