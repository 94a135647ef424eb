from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from cachefs.store.base import ObjectStore
from tests.publish.stage import Member, memory


def _run(main: Callable[[], Any], **given: Any) -> Any:
    return trio.run(main, **{**given, "clock": MockClock(autojump_threshold=0)})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Waits take no time in the asynchronous tests of this directory."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and iscoroutinefunction(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.trio(run=_run), append=False)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Callable[..., Member]]:
    """Make members; each is closed at the end."""
    made: list[Member] = []

    def make(store: ObjectStore | None = None, **given: str) -> Member:
        made.append(Member(tmp_path, store or memory(), **given))
        return made[-1]

    yield make
    for member in made:
        member.close()
