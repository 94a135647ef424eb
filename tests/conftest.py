"""For every test: an undeclared warning in the log is a failure; Hypothesis profiles `ci` (default) and `long`."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from trio._core import _thread_cache

from cachefs import log

settings.register_profile("ci", max_examples=100, deadline=None, print_blob=True)
settings.register_profile("long", settings.get_profile("ci"), max_examples=5000, suppress_health_check=[*HealthCheck])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

log.bridge()


class DeclaredWarnings(logging.Handler):
    """Collects records of WARNING and above, and knows which of them the test expects.

    `declared_warnings(r"retry .*503")` expects at least one record that holds the pattern (in the event or its facts);
    with `optional=True` there may be none, for warnings that depend on timing.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []
        self._declared: dict[str, bool] = {}

    def __call__(self, pattern: str, *, optional: bool = False) -> None:
        self._declared[pattern] = optional

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if isinstance(record.msg, dict):  # ours: the event, then its facts
            facts = {key: value for key, value in record.msg.items() if key not in ("event", "level", "logger", "time")}
            text = " ".join([str(record.msg["event"]), *(f"{key}={value}" for key, value in facts.items())])
        self.records.append(f"{record.levelname} {record.name}: {text}")

    def problems(self) -> list[str]:
        """Return one line for each record that nothing declares, and for each declaration that nothing met."""
        undeclared = [
            f"undeclared: {record}"
            for record in self.records
            if not any(re.search(pattern, record) for pattern in self._declared)
        ]
        unmet = [
            f"declared but not logged: {pattern}"
            for pattern, optional in self._declared.items()
            if not optional and not any(re.search(pattern, record) for record in self.records)
        ]
        return undeclared + unmet


@pytest.fixture(autouse=True)
def declared_warnings() -> Iterator[DeclaredWarnings]:
    """Fail the test for every logged warning that it did not declare, and for every declared one that is missing."""
    watch = DeclaredWarnings()
    root = logging.getLogger()
    root.addHandler(watch)
    yield watch
    root.removeHandler(watch)
    if problems := watch.problems():
        pytest.fail("log:\n  " + "\n  ".join(problems), pytrace=False)


@pytest.fixture
def no_threads(monkeypatch) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the system refuses every thread, as it does at a limit of processes."""

    @contextmanager
    def refused() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(_thread_cache, "THREAD_CACHE", _thread_cache.ThreadCache())  # none is idle
            before = threading.stack_size(1 << 47)  # more than there are addresses
            try:
                yield
            finally:
                threading.stack_size(before)

    return refused


@pytest.fixture
def readme_table() -> Callable[[str], str | None]:
    """Return a function: the README's text between the markers of a name; None while there is no README."""

    def section(name: str) -> str | None:
        readme = Path(__file__).parent.parent / "README.md"
        if not readme.exists():
            return None
        found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", readme.read_text(), re.DOTALL)
        assert found, f"README.md has no section between <!-- {name} --> markers"
        return found[1].strip() + "\n"

    return section
