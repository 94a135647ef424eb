"""`python -m integration.bench [--staging DIR] [--rounds N] [--quick] [--json FILE]`: see the package."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from integration.bench import flushing, targets, workload
from integration.bench.workload import MIB

Figures = dict[str, dict[str, list[float]]]
"""By figure and target: the values of the rounds."""
ORDER = ("raw", "kernel", "python", "pyfuse3", "rclone", "rclone copy", "cachefs", "open + close")
"""Columns of the tables; ratios are to the first one there."""
console = Console(width=150)


def data_paths(place: Path, staging: Path, *, rounds: int, files: int, size: int, count: int) -> Figures:
    """Compare save, read and metadata on all targets, round by round in a rotating order."""
    figures: Figures = {}
    with ExitStack() as stack:
        raw = staging / "raw"
        raw.mkdir()
        store = f"file://{place / 'store'}"
        (place / "store").mkdir()
        local = ("--no-publish", "--reserve", "0")
        served = stack.enter_context(targets.rclone_serve(place))
        compared = [
            targets.Target("raw", raw, raw),
            stack.enter_context(targets.cachefs("kernel", place, staging, store, *local, "--data-path", "kernel")),
            stack.enter_context(targets.cachefs("python", place, staging, store, *local, "--data-path", "python")),
            stack.enter_context(targets.pyfuse3_example(place, staging)),
            stack.enter_context(targets.rclone_mount(place, staging, served)),
        ]
        for number in range(rounds + 1):
            order = compared[number % len(compared) :] + compared[: number % len(compared)]
            for target in order:
                found = one_round(target, number, files=files, size=size, count=count)
                if number:  # the first round warms up
                    for name, value in found.items():
                        figures.setdefault(name, {}).setdefault(target.name, []).append(value)
            console.print(f"round {number} of {rounds} done", style="dim")
    return figures


def one_round(target: targets.Target, number: int, *, files: int, size: int, count: int) -> dict[str, float]:
    """Run the whole workload once in one target."""
    where = target.directory / f"round-{number}"
    where.mkdir()
    cpu = target.cpu()
    found = {"save, 16 MiB writes, B/s": workload.save(where, files=files, size=size, block=16 * MIB, seed=number)}
    if target.pid:
        found["daemon CPU s per GiB written"] = (target.cpu() - cpu) * (1 << 30) / (files * size)
    found["read cold, B/s"] = workload.read(where, backing=target.backing / where.name)
    found["read warm, B/s"] = workload.read(where)
    found["save, 128 KiB writes, B/s"] = workload.save(where, files=files, size=size, block=MIB // 8, seed=number)
    found |= workload.metadata(where, count=count)
    shutil.rmtree(where)
    return found


def shown(value: float) -> str:
    """Return a figure for the table."""
    if value >= 1e6:
        return f"{value / MIB:,.0f} Mi"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(title: str, figures: Figures) -> Table:
    """Lay figures out: medians, and the median ratio to the first target that has the figure."""
    found = dict.fromkeys(name for by_target in figures.values() for name in by_target)
    names = [name for name in ORDER if name in found]
    out = Table(title=title)
    out.add_column("figure")
    for name in names:
        out.add_column(name, justify="right")
    for figure, by_target in figures.items():
        base = next(by_target[name] for name in names if name in by_target)
        cells = []
        for name in names:
            values = by_target.get(name)
            if values is None:
                cells.append("-")
                continue
            ratio = statistics.median(
                value / one if one else float("nan") for value, one in zip(values, base, strict=True)
            )
            cells.append(f"{shown(statistics.median(values))} ({ratio:.2f})")
        out.add_row(figure, *cells)
    return out


def transposed(rounds: dict[str, list[dict[str, float]]]) -> Figures:
    """Return rounds of figures by target as figures by target of rounds."""
    figures: Figures = {}
    for target, found in rounds.items():
        for one in found:
            for name, value in one.items():
                figures.setdefault(name, {}).setdefault(target, []).append(value)
    return figures


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--staging", type=Path, default=Path("/dev/shm"), help="medium of all staging directories")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--only", choices=("data", "flush", "latency"), help="one part of it")
    parser.add_argument("--json", type=Path, help="write every value here")
    given = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "staging": str(given.staging),
    }
    files, size, count = (2, 16 * MIB, 200) if given.quick else (8, 128 * MIB, 2000)
    with (
        tempfile.TemporaryDirectory(prefix="cachefs-bench-") as home,
        tempfile.TemporaryDirectory(prefix="cachefs-bench-", dir=given.staging) as medium,
    ):
        place, staging = Path(home), Path(medium)
        if given.only in (None, "data"):
            result["data"] = data_paths(place, staging, rounds=given.rounds, files=files, size=size, count=count)
            console.print(table(f"data paths, staging on {given.staging} (ratio to raw)", result["data"]))
        with targets.sink(place) as endpoint:
            if given.only in (None, "flush"):
                result["flush"] = transposed(flushing.throughput(place, staging, endpoint, given.rounds))
                console.print(table("flush of 1 GiB into a sink (ratio to rclone copy)", result["flush"]))
            if given.only in (None, "latency"):
                late = flushing.latency(place, staging, endpoint, given.rounds, 2.0 if given.quick else 5.0)
                result["latency"] = transposed({"open + close": late})
                console.print(table("latency of open and close", result["latency"]))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
