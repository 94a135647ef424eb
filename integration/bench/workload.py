"""What is timed in a directory: saves, reads, metadata. Standard library; each function returns figures by name."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
clock = time.perf_counter


def save(directory: Path, *, files: int, size: int, block: int, seed: int) -> float:
    """Write `files` files of `size` bytes in `block`-byte writes; return bytes per second, close included."""
    data = memoryview(random.Random(seed).randbytes(block))
    began = clock()
    for number in range(files):
        fd = os.open(directory / f"shard-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        left = size
        while left:
            left -= os.write(fd, data[: min(block, left)])
        os.close(fd)
    return files * size / (clock() - began)


def read(directory: Path, *, backing: Path | None = None) -> float:
    """Read every file of a directory in 16 MiB pieces; return bytes per second. With `backing`, the directory on the
    medium in which the same files are, they are in no page cache before: neither under this name nor under that.
    """
    buffer = bytearray(16 * MIB)
    total, seconds = 0, 0.0
    for path in sorted(directory.glob("shard-*")):
        fd = os.open(path, os.O_RDONLY)
        if backing is not None:
            forget(fd)
            behind = os.open(backing / path.name, os.O_RDWR)
            forget(behind)
            os.close(behind)
        began = clock()
        while count := os.readv(fd, [buffer]):
            total += count
        seconds += clock() - began
        os.close(fd)
    return total / seconds


def forget(fd: int) -> None:
    """Take a file out of the page cache; only what is on the medium can go."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def metadata(directory: Path, *, count: int) -> dict[str, float]:
    """Work on `count` small files; return operations per second."""
    where = directory / "meta"
    where.mkdir()
    names = [str(where / f"file-{number:05d}") for number in range(count)]
    rates: dict[str, float] = {}

    def timed(name: str, began: float) -> None:
        rates[name] = count / (clock() - began)

    began = clock()
    for name in names:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, b"x" * 4096)
        os.close(fd)
    timed("create + write 4 KiB + close, per s", began)
    for name in names:
        os.stat(name)
    began = clock()
    for name in names:
        os.stat(name)
    timed("repeated stat, per s", began)
    began = clock()
    rounds = 5
    for _ in range(rounds):
        if len(os.listdir(where)) != count:
            raise AssertionError("a listing is not complete")
    rates["listings, per s"] = rounds / (clock() - began)
    began = clock()
    for name in names:
        os.rename(name, f"{name}.new")
    timed("rename, per s", began)
    began = clock()
    for name in names:
        os.unlink(f"{name}.new")
    timed("unlink, per s", began)
    where.rmdir()
    return rates


def latencies(directory: Path, going: Callable[[], bool]) -> list[float]:
    """Create and close small files while something is going on, which is asked now and then; return the seconds that
    each open and close took together.
    """
    taken = []
    where = directory / "latency"
    where.mkdir(exist_ok=True)
    number = 0
    while number % 20 or going():
        began = clock()
        fd = os.open(where / f"f{number % 100}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.close(fd)
        taken.append(clock() - began)
        number += 1
        time.sleep(0.002)  # training code opens files now and then; a loop without a pause measures the loop
    shutil.rmtree(where)
    return taken


def lasting(seconds: float) -> Callable[[], bool]:
    """Return what goes on for so long from now."""
    until = clock() + seconds
    return lambda: clock() < until


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
