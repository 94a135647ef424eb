from __future__ import annotations

from collections.abc import Iterator

import pytest

from cachefs.store.base import ObjectStore
from cachefs.store.directory import DirectoryStore
from cachefs.store.memory import MemoryStore
from tests.servers.fixtures import ministack_server, moto_server  # noqa: F401
from tests.store.backends import BACKENDS, SERVERS, Backend


@pytest.fixture(
    params=[
        pytest.param(backend, id=backend.name, marks=[pytest.mark.server] if backend.name in SERVERS else [])
        for backend in BACKENDS
    ]
)
def backend(request) -> Backend:
    return request.param


@pytest.fixture
def store(backend: Backend, request, tmp_path) -> Iterator[ObjectStore]:
    """An empty store of the backend, with the key prefix `p` where a backend has prefixes."""
    if backend.name == "memory":
        yield MemoryStore("p", min_part_size=backend.part_size)
    elif backend.name == "directory":
        made = DirectoryStore(str(tmp_path))
        made.prepare()
        yield made
    else:
        server = request.getfixturevalue(f"{backend.name}_server")
        with server.store(server.bucket(), "p") as made:
            yield made
