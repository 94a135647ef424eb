"""pytest fixtures; a conftest.py imports the ones it wants.

One process of each server serves the whole run. What a module left in it is forgotten at the module's end: moto keeps
every body that it was ever sent on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.servers import Server, running

_RUNNING = pytest.StashKey[dict[str, Server]]()


@pytest.fixture(scope="module")
def moto_server(pytestconfig: pytest.Config) -> Iterator[Server]:
    yield from _emptied(_server(pytestconfig, "moto"))


@pytest.fixture(scope="module")
def ministack_server(pytestconfig: pytest.Config) -> Iterator[Server]:
    yield from _emptied(_server(pytestconfig, "ministack"))


def _server(config: pytest.Config, name: str) -> Server:
    servers = config.stash.setdefault(_RUNNING, {})
    if name not in servers:
        stack = ExitStack()
        servers[name] = stack.enter_context(running(name))
        config.add_cleanup(stack.close)
    return servers[name]


def _emptied(server: Server) -> Iterator[Server]:
    yield server
    server.forget()
