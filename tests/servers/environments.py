"""Builds the servers' virtual environments from their lock files; does nothing when one is up to date."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
ROOT = _HERE.parent.parent / ".envs"


def install(name: str) -> Path:
    """Return the environment's directory, built if need be. Concurrent callers wait for each other."""
    lock_file = _HERE / f"{name}.lock"
    stamp = hashlib.sha256(lock_file.read_bytes()).hexdigest()
    home = ROOT / name
    ROOT.mkdir(exist_ok=True)
    with open(ROOT / f"{name}.building", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        done = home / "built-from"
        if not (done.exists() and done.read_text() == stamp):
            shutil.rmtree(home, ignore_errors=True)
            _build(home, lock_file)
            done.write_text(stamp)
    return home


def _build(home: Path, lock_file: Path) -> None:
    """Use uv when it is there, and otherwise what every Python has."""
    beside = os.path.dirname(sys.executable)
    uv = shutil.which("uv", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    python = str(home / "bin/python")
    if uv:
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(home))
        _run(uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "-r", str(lock_file))
    else:
        _run(sys.executable, "-m", "venv", str(home))
        _run(python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(lock_file))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
