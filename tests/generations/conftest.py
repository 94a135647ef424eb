"""Fixtures of the tests of generations."""

from __future__ import annotations

import pytest

from tests.generations.mounted import Mount


@pytest.fixture
def mount(tmp_path):
    made = Mount(tmp_path / "staging")
    yield made
    made.die()
