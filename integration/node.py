"""One node under test: a cachefs daemon as a process, its mount, its staging."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CACHEFS = [str(Path(sys.executable).with_name("cachefs"))]
PATIENCE = 120.0
"""Seconds that anything may take before a test fails. The daemon's engine makes way for all others (nice), also for the
tests that run beside this one.
"""


def await_condition(holds: Callable[[], Any], what: str, *, timeout: float = PATIENCE) -> Any:
    """Look again and again until `holds()` is true; return its value. Fails the test when it stays false."""
    deadline = time.monotonic() + timeout
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {timeout:g} s: {what}")
        time.sleep(0.02)
    return value


def engine(one: Node) -> int:
    """Return the pid of a daemon's engine, 0 while there is none."""
    assert one.process is not None
    tasks = Path(f"/proc/{one.process.pid}/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    for pid in children:
        if b"cachefs.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return 0


class Node:
    """A daemon that can be started, killed and started again on the same staging."""

    def __init__(
        self, root: Path, store: str, *, options: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self.root = root
        self.mnt = root / "mnt"
        """Where the tests see the mount."""
        self.staging = root / "staging"
        self.log = root / "daemon.log"
        self.store = store
        self.options = options
        self.environ = {**os.environ, **(environ or {})}
        self.process: subprocess.Popen[bytes] | None = None
        root.mkdir(parents=True, exist_ok=True)

    @property
    def mountpoint(self) -> Path:
        """Return where the daemon's own machine sees the mount."""
        return self.mnt

    def command(self, *extra: str) -> list[str]:
        # No reserve: a test fails for the room that it makes scarce itself, not for how full this machine's disk is.
        defaults = ("--metrics", "off", "--settle", "0.5", "--quiet", "1", "--drain-timeout", "20")
        defaults += ("--pointer-poll", "0.5", "--reserve", "0")
        place = (str(self.mountpoint), "--store", self.store, "--staging", str(self.staging))
        return self.inside([*CACHEFS, "mount", *place, *defaults, *self.options, *extra])

    def inside(self, command: list[str]) -> list[str]:
        """Return a command that runs another on this node's machine."""
        return command

    def send_signal(self, number: int) -> None:
        """Send a signal to the daemon."""
        assert self.process is not None
        self.process.send_signal(number)

    def start(self, *extra: str) -> Node:
        """Start the daemon and wait until the mount serves."""
        assert self.process is None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(*extra), env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        await_condition(self._serves, f"{self.mnt} serves")
        return self

    def refuses_to_start(self, *extra: str) -> tuple[int, str]:
        """Start the daemon, which must fail before the mount serves; return its exit code and what it said."""
        done = subprocess.run(
            self.command(*extra), env=self.environ, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert not os.path.ismount(self.mnt)
        return done.returncode, done.stderr

    def _serves(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon exited with {self.process.returncode}:\n{self.logged()}")
        try:
            os.getxattr(self.mnt, "user.cachefs.socket")
        except OSError:
            return False
        return True

    def logged(self) -> str:
        """Return the daemon's log."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill the daemon as kill -9 does; the mount stays behind, dead."""
        assert self.process is not None
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the daemon; return its exit code."""
        assert self.process is not None
        self.send_signal(number)
        code = self.process.wait(PATIENCE)
        self.process = None
        return code

    def end(self) -> None:
        """Leave nothing behind: no process, no mount."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process = None
        if subprocess.run(["mountpoint", "-q", self.mnt], check=False).returncode == 0 or self._dead():
            subprocess.run(["fusermount3", "-u", "-z", self.mnt], check=False, capture_output=True)

    def _dead(self) -> bool:
        return f" {self.mnt} " in Path("/proc/self/mounts").read_text()

    def run(
        self, *arguments: str | Path, check: bool = True, timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """Run a cachefs command."""
        done = subprocess.run(
            self.inside([*CACHEFS, *map(str, arguments)]),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"cachefs {arguments} exited with {done.returncode}: {done.stderr}\n{self.logged()}")
        return done

    def status(self) -> dict[str, Any]:
        """Return the daemon's status."""
        result: dict[str, Any] = json.loads(self.run("status", "--json", self.mountpoint).stdout)
        return result

    def generations(self, path: str) -> list[dict[str, Any]]:
        """Return the attempts of a generation, oldest first."""
        return [one for one in self.status()["generations"] if one["path"] == path]

    def wait(self, path: str, state: str = "published", *, timeout: float = PATIENCE) -> None:
        """Wait until the newest save of a generation has reached a state."""
        self.run("wait", self.mountpoint / path, "--state", state, "--timeout", str(timeout), timeout=timeout + 10)

    def wipe_staging(self) -> None:
        """Lose the local disk."""
        assert self.process is None
        shutil.rmtree(self.staging)

    def restore(self, run: str, target: Path, *extra: str) -> Path:
        """Restore a run's newest generation with the command line; return the target directory."""
        self.run("restore", run, target, "--store", self.store, *extra)
        return target

    def environ_store(self, **more: str) -> None:
        """Set environment variables for what is started from now on."""
        self.environ.update(more)


@contextmanager
def node(root: Path, store: str, **settings: Any) -> Iterator[Node]:
    """A started node that ends with the block."""
    one = Node(root, store, **settings)
    try:
        yield one.start()
    finally:
        one.end()
