"""pytest fixtures; a conftest.py imports the ones it wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Server, running


@pytest.fixture(scope="session")
def moto_server() -> Iterator[Server]:
    with running("moto") as server:
        yield server


@pytest.fixture(scope="session")
def ministack_server() -> Iterator[Server]:
    with running("ministack") as server:
        yield server
