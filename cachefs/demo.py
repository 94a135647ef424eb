"""`make demo`: the whole path once, on this machine: mount, save, publish, lose the disk, restore, compare.

The training script that is run is an ordinary one: it knows nothing of cachefs. Everything happens below ./demo/tour.
Exits with 0 only if the restored bytes are the bytes that were saved.
"""

from __future__ import annotations

import filecmp
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from rich.live import Live

from cachefs import clock, control
from cachefs.cli import show
from cachefs.errors import CachefsError
from cachefs.mount.session import mounted_type, unmount
from cachefs.status import Status

TRAIN = '''\
"""An ordinary training loop: saves a checkpoint every 100 steps, keeps the last two."""
import os, pickle, shutil, sys, time

try:
    import torch
except ImportError:
    torch = None

out, size = sys.argv[1], 16 << 20


def dump(value, path):
    if torch is not None:
        torch.save(value, path)
    else:
        with open(path, "wb") as file:
            pickle.dump(value, file)


def state(step):
    if torch is not None:
        return {"step": step, "weights": torch.full((size // 4,), float(step))}
    return {"step": step, "weights": os.urandom(size)}


saved, seconds, kept = 0, 0.0, []
for step in (100, 200, 300, 400):
    model, optimizer = state(step), state(-step)
    began = time.perf_counter()
    temp, final = f"{out}/tmp-checkpoint-{step}", f"{out}/checkpoint-{step}"
    os.makedirs(temp)
    dump(model, f"{temp}/model.pt")
    dump(optimizer, f"{temp}/optimizer.pt")
    with open(f"{temp}/trainer_state.json", "w") as file:
        file.write('{"global_step": %d}' % step)
    os.rename(temp, final)
    seconds += time.perf_counter() - began
    saved += sum(os.path.getsize(f"{final}/{name}") for name in os.listdir(final))
    kept.append(final)
    if len(kept) > 2:
        shutil.rmtree(kept.pop(0))  # the usual rotation, right after the save
print(f"{saved} bytes in {seconds:.3f} s")
'''
RUN = "my-run"
LAST = "checkpoint-400"
PATIENCE = 120.0
"""Seconds until the last save must be published."""


def main() -> int:
    """Run the tour; return the exit code."""
    place = Path("demo/tour").absolute()
    try:
        return _tour(place)
    except (CachefsError, subprocess.CalledProcessError, OSError) as error:
        show.console.print(f"demo failed: {error}", style="red", markup=False)
        return 1
    finally:
        _stop(place / "mnt")


def _tour(place: Path) -> int:
    _stop(place / "mnt")
    shutil.rmtree(place, ignore_errors=True)
    mnt, store, staging = place / "mnt", place / "store", place / "staging"
    (place / "store").mkdir(parents=True)
    _say(f"mounting {mnt} (store: file://{store})")
    _cachefs("mount", mnt, "--store", f"file://{store}", "--staging", staging, "--metrics", "off", "--daemon")

    _say("running an ordinary training script that saves into the mount")
    script = place / "train.py"
    script.write_text(TRAIN)
    (mnt / RUN).mkdir()
    began = clock.monotonic()
    output = subprocess.run([sys.executable, script, mnt / RUN], check=True, capture_output=True, text=True).stdout
    match = re.fullmatch(r"(\d+) bytes in ([\d.]+) s\n", output)
    if match is None:
        raise CachefsError(f"the training script said {output!r}")
    size, seconds = int(match[1]), float(match[2])
    shutil.copytree(mnt / RUN / LAST, place / "original")

    _say("waiting until everything is published")
    published = _watch(mnt, began)

    _say("losing the node: stopping the daemon, deleting the staging directory")
    _stop(mnt)
    shutil.rmtree(staging)

    _say("restoring from the store alone")
    _cachefs("restore", RUN, place / "restored", "--store", f"file://{store}")
    compared = _compare(place / "original", place / "restored" / LAST)
    show.console.print(
        f"\n[green]all {compared} files of {LAST} came back byte for byte[/]\n"
        f"  written by the script   {show.size(size)} at {show.size(size / seconds)}/s\n"
        f"  published after         {published:.1f} s\n",
        highlight=False,
    )
    return 0


def _say(text: str) -> None:
    show.console.print(f"[bold]•[/] {text}", highlight=False)


def _cachefs(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "cachefs.cli.main", *map(str, arguments)], check=True)


def _watch(mnt: Path, began: float) -> float:
    """Show the live status until every save is published; return the seconds since the script started."""
    socket, _ = control.find(mnt)
    with Live(console=show.console, auto_refresh=False) as live:
        while True:
            status = msgspec.convert(control.ask(socket, control.StatusRequest()), Status)
            live.update(show.status(status), refresh=True)
            if any(one.state == "abandoned" for one in status.generations):
                raise CachefsError("a save was abandoned")
            if status.generations and all(one.state == "published" for one in status.generations):
                return clock.monotonic() - began
            if clock.monotonic() - began > PATIENCE:
                raise CachefsError(f"not published after {PATIENCE:g} s")
            show.pause(0.2)


def _stop(mnt: Path) -> None:
    """Stop the daemon behind a mount, if there is one, and wait until it is gone."""
    try:
        socket, _ = control.find(mnt)
        pid = msgspec.convert(control.ask(socket, control.StatusRequest()), Status).pid
    except CachefsError:
        if mounted_type(mnt) is not None:
            unmount(mnt)
        return
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not select.select([fd], [], [], PATIENCE)[0]:
            raise CachefsError("the daemon does not stop")
    finally:
        os.close(fd)


def _compare(original: Path, restored: Path) -> int:
    """Return the number of files, all equal; raises CachefsError for the first that is not."""
    names = sorted(path.name for path in original.iterdir())
    if names != sorted(path.name for path in restored.iterdir()):
        raise CachefsError(f"the restored directory has other files than {names}")
    for name in names:
        if not filecmp.cmp(original / name, restored / name, shallow=False):
            raise CachefsError(f"{name} came back with other bytes")
    return len(names)


if __name__ == "__main__":
    sys.exit(main())
