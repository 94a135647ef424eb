"""systemd/cachefs@.service: accepted by systemd, equal to the exit codes, and its mount stays visible."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.config.schema import KEYS
from cachefs.errors import CorruptError, DeniedError, FencedError, InvalidError, PendingError, ProbeError

UNIT = Path(__file__).parent.parent / "systemd" / "cachefs@.service"
MNT_DETACH = 2


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().replace("\\\n", " ").splitlines():
        if match := re.match(r"([A-Za-z]+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def one(name: str) -> str:
    (value,) = settings()[name]
    return value


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments, str(UNIT)], capture_output=True, text=True, timeout=60, check=False
    )


def test_systemd_accepts_every_line():
    result = analyze("verify")
    assert (result.returncode, result.stderr) == (0, "")


def test_exposure_stays_within_what_a_mount_needs():
    """5.1 of 10 with systemd 252. The rest is root, CAP_SYS_ADMIN and the mount namespace that it must not have."""
    result = analyze("security", "--offline=true", "--no-pager", "--threshold=55")
    assert result.returncode == 0, result.stdout


def test_exit_codes_are_those_of_the_errors():
    never = {kind.exit_code for kind in (InvalidError, CorruptError, ProbeError, DeniedError, FencedError)}
    assert {int(code) for code in one("RestartPreventExitStatus").split()} == never
    assert one("SuccessExitStatus") == str(PendingError.exit_code)
    assert one("Restart") == "on-failure"


def test_no_setting_hides_the_mount_from_the_host():
    """Each of these gives the service a mount namespace of its own (systemd.exec(5))."""
    hiding = re.compile(
        r"Private(Mounts|Tmp|Devices|IPC|Users)|MountFlags|Protect(System|Home|Proc|Kernel\w+|ControlGroups)|ProcSubset|"
        r"(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec)Paths|Bind(ReadOnly)?Paths|TemporaryFileSystem|Root\w+|DynamicUser"
    )
    assert [name for name in settings() if hiding.fullmatch(name)] == []


def test_a_default_drain_ends_before_systemd_kills():
    assert int(one("TimeoutStopSec")) > float(KEYS["drain_timeout"].default.strip("`s"))


@pytest.fixture
def mountpoint(tmp_path) -> Iterator[Path]:
    path = tmp_path / "mount point"
    path.mkdir()
    yield path
    ctypes.CDLL(None).umount2(os.fsencode(path), MNT_DETACH)


def mount(source: bytes, target: Path, kind: bytes, options: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source, os.fsencode(target), kind, 0, options) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind!r}")


def stop_post(mountpoint: Path, tmp_path: Path) -> None:
    """Run the unit's ExecStopPost as systemd would, on a configuration of our own."""
    file = tmp_path / "job.toml"
    file.write_text(f'mountpoint = "{mountpoint}"\n')
    command = one("ExecStopPost").removeprefix("-").replace("$$", "$").replace("/etc/cachefs/%i.toml", str(file))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(shlex.split(command), env={"PATH": path}, cwd=UNIT.parent.parent, timeout=60, check=False)


@pytest.mark.mount
def test_after_a_crash_the_dead_mount_is_taken_away(mountpoint, tmp_path):
    device = os.open("/dev/fuse", os.O_RDWR)
    mount(b"cachefs", mountpoint, b"fuse", f"fd={device},rootmode=40000,user_id=0,group_id=0".encode())
    os.close(device)
    with pytest.raises(OSError, match="not connected"):
        mountpoint.stat()
    stop_post(mountpoint, tmp_path)
    assert not mountpoint.is_mount()
    assert list(mountpoint.iterdir()) == []


@pytest.mark.mount
def test_a_live_mount_is_left_alone(mountpoint, tmp_path):
    mount(b"other", mountpoint, b"tmpfs", b"")
    stop_post(mountpoint, tmp_path)
    assert mountpoint.is_mount()
