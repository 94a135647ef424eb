"""The service manager's notification protocol (sd_notify(3)): ready, status, watchdog, stopping.

Every function returns whether the message was handed over: False when no manager listens, or when it does not take the
message within a second. That is never a reason to stop serving files, so nothing is raised.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def ready(status: str = "", *, mainpid: int | None = None, env: Mapping[str, str] = os.environ) -> bool:
    """Say that the mount is served. `mainpid` names the process to supervise when it is not the one started."""
    return _send({"READY": 1, "STATUS": status or None, "MAINPID": mainpid}, env)


def status(text: str, *, env: Mapping[str, str] = os.environ) -> bool:
    """Set the one line that `systemctl status` shows."""
    return _send({"STATUS": text}, env)


def stopping(text: str = "", *, env: Mapping[str, str] = os.environ) -> bool:
    """Say that the stop has begun."""
    return _send({"STOPPING": 1, "STATUS": text or None}, env)


def watchdog(*, env: Mapping[str, str] = os.environ) -> bool:
    """Say that the daemon is alive: at least once per `watchdog_interval`, from the loop that would hang."""
    return _send({"WATCHDOG": 1}, env)


def extend_timeout(seconds: float, *, env: Mapping[str, str] = os.environ) -> bool:
    """Ask for `seconds` from now before the manager gives up on the start or the stop that is under way."""
    return _send({"EXTEND_TIMEOUT_USEC": int(seconds * 1e6)}, env)


def watchdog_interval(env: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds between two `watchdog` calls: half the manager's timeout; None when none is asked of us."""
    usec, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID") or str(os.getpid())
    if not (usec.isascii() and usec.isdecimal()) or pid != str(os.getpid()):
        return None
    return int(usec) / 2e6 or None


def _send(fields: Mapping[str, str | int | None], env: Mapping[str, str]) -> bool:
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    # One field a line, so a line break inside a status would start a field of its own.
    message = "\n".join(f"{key}={' '.join(str(value).split())}" for key, value in fields.items() if value is not None)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.settimeout(1.0)
            # "@" stands for the NUL byte of Linux's abstract addresses.
            manager.sendto(message.encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError:
        return False
    return True
