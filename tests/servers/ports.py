"""Ports of the loopback for servers that are started with one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
_random = random.SystemRandom()  # tests that run side by side may seed the other one alike


def free_port() -> int:
    """Return a port that nobody uses now, and that the kernel gives to no outgoing connection: one of those could be
    taken before the server that is to have it binds it.
    """
    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _random.randrange(_LOWEST, outgoing if outgoing > 2 * _LOWEST else 6 * _LOWEST)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
