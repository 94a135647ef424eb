"""The flush: its speed and CPU against `rclone copy` into the same server, and what it does to open/close latency."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from integration.bench import targets, workload

GIB = 1 << 30
OPTIONS = ("--test-level", "checksum", "--part-size", "16MiB", "--no-loose", "--reserve", "0")
CACHEFS = str(Path(sys.executable).with_name("cachefs"))


def throughput(place: Path, staging: Path, endpoint: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Send 1 GiB in one file, in turn by cachefs and by `rclone copy`; wall and CPU seconds of each round."""
    figures: dict[str, list[dict[str, float]]] = {"cachefs": [], "rclone copy": []}
    with targets.cachefs("flush", place, staging, "s3://bench/flush", "--endpoint-url", endpoint, *OPTIONS) as target:
        for number in range(rounds + 1):  # the first one warms up
            ours = flush(target, number, GIB)
            theirs = copy(place, staging, endpoint, number)
            if number:
                figures["cachefs"].append(ours)
                figures["rclone copy"].append(theirs)
    return figures


def write(target: targets.Target, name: str, size: int) -> Path:
    """Write a save that is complete when its directory is renamed; return its temporary name."""
    temp = target.directory / "run" / f"tmp-checkpoint-{name}"
    temp.mkdir(parents=True)
    data = os.urandom(16 << 20)
    with (temp / "model.bin").open("wb") as file:
        for _ in range(size // len(data)):
            file.write(data)
    (temp / "trainer_state.json").write_text("{}")
    return temp


def flush(target: targets.Target, number: int, size: int) -> dict[str, float]:
    """Time from the close of a save to `flushed`."""
    temp = write(target, str(number), size)
    final = temp.with_name(f"checkpoint-{number}")
    cpu, began = target.cpu(), time.perf_counter()
    temp.rename(final)
    await_state(final, ("flushed", "sealed", "tested", "published"))
    figures = {"wall s": time.perf_counter() - began, "CPU s/GiB": (target.cpu() - cpu) * GIB / size}
    await_state(final, ("published",))
    (final / "model.bin").unlink()
    return figures


def await_state(path: Path, states: tuple[str, ...]) -> None:
    """Wait until a save has reached one of some states, asking the mount itself."""
    targets.await_true(lambda: state(path) in states, f"{path} is {states}")


def state(path: Path) -> str:
    """Return how far a save is."""
    return os.getxattr(path, "user.cachefs.state").decode()


def is_flushing(path: Path) -> bool:
    """Return whether bytes of a save are still to be sent."""
    return state(path) in ("open", "staged")


def copy(place: Path, staging: Path, endpoint: str, number: int) -> dict[str, float]:
    """Time `rclone copy` of one file of 1 GiB in parts of 16 MiB."""
    source = staging / "copied"
    source.mkdir(exist_ok=True)
    data = os.urandom(16 << 20)
    with (source / f"{number}.bin").open("wb") as file:
        for _ in range(GIB // len(data)):
            file.write(data)
    options = ["--s3-chunk-size", "16Mi", "--s3-upload-cutoff", "16Mi", *targets.rclone_options(place, endpoint)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [targets.rclone(), "copy", str(source), f"bench:bench/copied-{number}", *options]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (source / f"{number}.bin").unlink()
    return {"wall s": seconds, "CPU s/GiB": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def latency(place: Path, staging: Path, endpoint: str, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Compare the latency of open and close, in turn on an idle mount for `seconds` and as long as it flushes 2 GiB."""
    figures = []
    with targets.cachefs("latency", place, staging, "s3://bench/late", "--endpoint-url", endpoint, *OPTIONS) as target:
        workload.latencies(target.directory, workload.lasting(1))
        for number in range(rounds):
            idle = workload.latencies(target.directory, workload.lasting(seconds))
            temps = [write(target, f"{number}{part}", GIB // 2) for part in range(4)]
            finals = [temp.with_name(temp.name.removeprefix("tmp-")) for temp in temps]
            for temp, final in zip(temps, finals, strict=True):
                temp.rename(final)
            busy = workload.latencies(target.directory, partial(is_flushing, finals[-1]))
            for final in finals:
                await_state(final, ("published",))
                (final / "model.bin").unlink()
            p99 = [workload.percentile(taken, 0.99) * 1000 for taken in (idle, busy)]
            figures.append({"idle p99 ms": p99[0], "flushing p99 ms": p99[1], "ratio": p99[1] / p99[0]})
    return figures
