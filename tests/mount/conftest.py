from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.mount.world import World


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    """A tree on a fresh staging; whatever a test opens and forgets, the daemon must not keep open."""
    made = World(tmp_path / "staging")
    yield made
    made.close()


@pytest.fixture
def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
