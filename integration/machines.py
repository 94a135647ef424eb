"""Several machines on one: each has a network, a mount table, processes and a host name of its own.

    with bridge() as switch:                       # 198.18.77.1, the host's end
        one = Machine(switch, root, "a", store)    # 198.18.77.2, host name a
        one.start()                                # boots the machine, if it is off, and starts the daemon

A machine is a process that is the first one of its own PID namespace: killing it is pulling the plug. The daemon's
mount has the same path on every machine, on a private tmpfs; the staging disk outlives the machine until `lose_disk`.
Needs root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration.node import Node, await_condition

NETWORK = "198.18.77"
"""A part of the network that is set aside for tests of devices (RFC 2544)."""
BRIDGE = "cfsbridge"


def run(*command: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Switch:
    """The network between machines. `address` is the host's own in it."""

    address = f"{NETWORK}.1"

    def __init__(self) -> None:
        self._machines = 0

    def next_address(self) -> str:
        """Return an address that no machine has."""
        self._machines += 1
        return f"{NETWORK}.{self._machines + 1}"


@contextmanager
def bridge() -> Iterator[Switch]:
    """A network for machines, until the block ends; one at a time on a host."""
    with open(Path(tempfile.gettempdir(), "cachefs-test-bridge.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)
        # With an address of its own: by default it has that of a machine, and another when that one is switched off.
        run("ip", "link", "add", BRIDGE, "address", "02:cf:50:00:00:01", "type", "bridge")
        try:
            run("ip", "addr", "add", f"{Switch.address}/24", "dev", BRIDGE)
            run("ip", "link", "set", BRIDGE, "up")
            yield Switch()
        finally:
            run("ip", "link", "del", BRIDGE)


class Machine(Node):
    """A node on a machine of its own, called `name`."""

    def __init__(self, switch: Switch, root: Path, name: str, store: str, **settings: Any) -> None:
        super().__init__(root / name, store, **settings)
        self.name = name
        self.address = switch.next_address()
        self._private = root / "mnt"
        self._cable = f"cfs-{name}"
        self._plug: subprocess.Popen[str] | None = None
        self._private.mkdir(exist_ok=True)

    @property
    def mountpoint(self) -> Path:
        return self._private / "ckpt"

    @property
    def first(self) -> int:
        """Return the id of the machine's first process."""
        assert self._plug is not None
        return child_of(self._plug.pid)

    def boot(self) -> None:
        """Switch the machine on, if it is off."""
        if self._plug is not None:
            return
        script = f"echo {self.name} > /proc/sys/kernel/hostname; mount -t tmpfs none {self._private}; echo up; exec cat"
        spaces = ("--mount", "--net", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
        self._plug = subprocess.Popen(
            ["unshare", *spaces, "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._plug.stdout is not None
        assert self._plug.stdout.readline() == "up\n"
        run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.first))
        run("ip", "link", "set", self._cable, "master", BRIDGE, "up")
        for words in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            run(*self.inside(["ip", *words.split()]))
        self.mnt = Path(f"/proc/{self.first}/root{self.mountpoint}")

    def inside(self, command: list[str]) -> list[str]:
        """Return a command that runs another on this machine."""
        return ["nsenter", "-t", str(self.first), "--mount", "--net", "--pid", "--uts", "--", *command]

    def start(self, *extra: str) -> Machine:
        self.boot()
        super().start(*extra)
        return self

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(child_of(self.process.pid), number)

    def power_off(self) -> None:
        """Pull the plug: every process of the machine is gone at once, and with them its mounts and its network."""
        assert self._plug is not None
        os.kill(self.first, signal.SIGKILL)
        self._plug.communicate()
        self._plug = None
        if self.process is not None:
            self.process.wait()
            self.process = None
        # The network itself may live on for minutes: the kernel says goodbye to the peers of its connections.
        subprocess.run(["ip", "link", "del", self._cable], check=False, capture_output=True)

    def lose_disk(self) -> None:
        """Put an empty disk in; the machine is off."""
        assert self._plug is None
        shutil.rmtree(self.staging)

    def cut(self) -> None:
        """Pull the network cable."""
        run("ip", "link", "set", self._cable, "down")

    def heal(self) -> None:
        """Plug the network cable in again."""
        run("ip", "link", "set", self._cable, "up")

    def end(self) -> None:
        if self._plug is not None:
            self.power_off()


def child_of(pid: int) -> int:
    """Return the only child of a process, once there is one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(await_condition(children.read_text, f"process {pid} has a child").split()[0])
