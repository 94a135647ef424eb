from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from cachefs.store.directory import DirectoryStore
from tests.retention.world import World, memory


def _run(main: Callable[[], Any], **given: Any) -> Any:
    return trio.run(main, **{**given, "clock": MockClock(autojump_threshold=0)})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Waits take no time in the asynchronous tests of this directory."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and iscoroutinefunction(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.trio(run=_run), append=False)


@pytest.fixture
def world() -> World:
    """A run in a store in memory."""
    return World(memory())


@pytest.fixture(params=["memory", "directory"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """A run in each kind of store."""
    if request.param == "memory":
        return World(memory())
    store = DirectoryStore(str(tmp_path))
    store.prepare()
    return World(store)
