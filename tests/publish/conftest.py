from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from cachefs.store.base import ObjectStore
from tests.publish.cluster import Cluster, Clusters
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


@pytest.fixture
def clusters(tmp_path: Path) -> Clusters:
    """Make clusters; their nodes live until the block ends."""

    @asynccontextmanager
    async def make(store: ObjectStore | None = None) -> AsyncIterator[Cluster]:
        async with trio.open_nursery() as nursery:
            cluster = Cluster(tmp_path, store or memory(), nursery)
            yield cluster
            nursery.cancel_scope.cancel()
        for node in cluster.nodes.values():
            node.close()

    return make
