"""Small file systems of their own for a staging directory: ext4 and XFS on loop devices, tmpfs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.node import await_condition

MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"],
}
LEAST = {"ext4": 64 << 20, "xfs": 320 << 20, "tmpfs": 64 << 20}
"""Sizes in bytes; XFS refuses anything smaller. The images are sparse."""
PATH = "/usr/sbin:/sbin:/usr/bin:/bin"


@contextmanager
def disk(kind: str, root: Path, size: int = 0) -> Iterator[Path]:
    """Mount an empty file system below `root`; nothing of it is left afterwards."""
    place, image = root / f"{kind}.disk", root / f"{kind}.image"
    place.mkdir(parents=True)
    size = size or LEAST[kind]
    if kind == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)
    else:
        with image.open("wb") as file:
            file.truncate(size)
        _run(*MAKE[kind], image)
        _run("mount", "-o", "loop", image, place)
    try:
        yield place
    finally:
        # The kernel may give the last files of a mount back a moment after they were closed.
        try:
            await_condition(lambda: _run("umount", place, check=False), f"{place} can be unmounted")
        finally:
            if place.is_mount():
                _run("umount", "-l", place)
            image.unlink(missing_ok=True)


def photograph(place: Path) -> None:
    """Keep what has reached the device of a `disk` on ext4 or XFS by now: what a power cut would leave."""
    _run("cp", "--sparse=always", place.with_suffix(".image"), place.with_suffix(".photo"))


def cut_power(place: Path) -> None:
    """Mount a `disk` again as it was when it was photographed. Who had files of it open has been killed."""
    await_condition(lambda: _run("umount", place, check=False), f"{place} can be unmounted", timeout=10)
    place.with_suffix(".photo").replace(place.with_suffix(".image"))
    _run("mount", "-o", "loop", place.with_suffix(".image"), place)


def _run(*command: str | Path, check: bool = True) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": PATH})
    if check and done.returncode != 0:
        pytest.fail(
            f"{command[0]} failed: {done.stderr.strip()}\nThese tests make file systems on loop devices: as root, with"
            " /dev/loop-control and CAP_SYS_ADMIN (docker run --privileged -v /dev:/dev).",
            pytrace=False,
        )
    return done.returncode == 0
