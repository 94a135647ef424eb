"""Serve a mount whose observer refuses every change of a name in the directory `refused`, after it was carried out:
refusing.py STAGING MOUNTPOINT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from cachefs.errors import StagingError
from cachefs.mount.kernel import Passthrough
from cachefs.mount.session import Session, prepare
from cachefs.mount.tree import Tree
from cachefs.staging.changes import Change, Kind
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins

NAMING = (Kind.CREATED, Kind.MADE_DIR, Kind.SYMLINKED, Kind.LINKED, Kind.REMOVED, Kind.RENAMED)


class Refusing:
    """Tells of a journal that cannot be written."""

    def before(self, change: Change) -> None:
        return None

    def after(self, change: Change) -> None:
        if change.kind in NAMING and change.path.startswith(b"refused/"):
            raise StagingError("the journal cannot be written: disk full")

    async def durable(self) -> None:
        pass

    async def wait_for_room(self) -> None:
        pass

    def answer(self, path: bytes, name: str) -> bytes | None:
        return None

    async def request(self, path: bytes, name: str) -> None:
        pass


async def main(staging: Path, mountpoint: Path) -> None:
    prepare(mountpoint)
    held = Staging(staging)
    session = Session(Tree(held, Pins(held), Refusing(), Passthrough("python")), mountpoint, allow_other=False)
    session.start()
    try:
        await session.serve()
    finally:
        session.stop()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]))
