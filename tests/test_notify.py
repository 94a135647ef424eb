"""notify.py against a real datagram socket, as the service manager would hold it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from cachefs import notify


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    name = str(tmp_path / "notify")
    address, variable = (name, name) if request.param == "path" else ("\0" + name, "@" + name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(5)
        yield sock, {"NOTIFY_SOCKET": variable}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda env: notify.ready(env=env), "READY=1"),
        (lambda env: notify.ready("serving /ckpt", mainpid=42, env=env), "READY=1\nSTATUS=serving /ckpt\nMAINPID=42"),
        (lambda env: notify.status("3 files pending", env=env), "STATUS=3 files pending"),
        (lambda env: notify.status("a\nREADY=1\r\nb", env=env), "STATUS=a READY=1 b"),
        (lambda env: notify.status("", env=env), "STATUS="),
        (lambda env: notify.stopping("draining", env=env), "STOPPING=1\nSTATUS=draining"),
        (lambda env: notify.watchdog(env=env), "WATCHDOG=1"),
        (lambda env: notify.extend_timeout(1.5, env=env), "EXTEND_TIMEOUT_USEC=1500000"),
    ],
)
def test_the_manager_receives_one_datagram(manager, call, message):
    sock, env = manager
    assert call(env) is True
    assert sock.recv(4096).decode() == message


@pytest.mark.parametrize(
    "value", [None, "", "vsock:2:1234", "relative", "/nonexistent/socket", "@cachefs-nobody-listens"]
)
def test_without_a_manager_nothing_is_sent_and_nothing_raised(value):
    assert notify.ready(env={} if value is None else {"NOTIFY_SOCKET": value}) is False


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid() + 1)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
    ],
)
def test_watchdog_interval_is_half_of_the_managers(env, seconds):
    assert notify.watchdog_interval(env) == seconds
