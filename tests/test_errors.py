"""errors.py: the table in its head is what users and the service file rely on."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from cachefs import errors
from cachefs.errors import CachefsError

ROW = re.compile(r"^ {4}(?P<tree>[ │├└─]*)(?P<name>[A-Z]\w+) .*?(?:exit (?P<exit>\d+) +(?P<errno>E[A-Z]+))?$")


def classes(kind: type[CachefsError] = CachefsError) -> Iterator[type[CachefsError]]:
    if kind.__module__ == errors.__name__:
        yield kind
        for child in kind.__subclasses__():
            yield from classes(child)


def documented() -> dict[str, tuple[str, int, str]]:
    """Return name → (parent, exit code, errno name); what a row leaves out is inherited."""
    table: dict[str, tuple[str, int, str]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if row := ROW.match(line):
            depth = len(row["tree"]) // 4
            parent = above.get(depth - 1, "Exception")
            inherited = table.get(parent, ("", 0, ""))
            table[row["name"]] = (parent, int(row["exit"] or inherited[1]), row["errno"] or inherited[2])
            above[depth] = row["name"]
    return table


def test_the_table_equals_the_classes():
    actual = {
        kind.__name__: (kind.__bases__[0].__name__, kind.exit_code, errno.errorcode[kind.errno]) for kind in classes()
    }
    assert len(actual) > 15
    assert documented() == actual


def test_every_class_with_an_exit_code_of_its_own_has_it_alone():
    """But for what is not there: whether it is the store or something in it, the error's text says."""
    assert errors.NoStoreError.exit_code == errors.NotFoundError.exit_code
    own = [kind.exit_code for kind in classes() if "exit_code" in vars(kind) and kind is not errors.NoStoreError]
    assert len(own) == len(set(own))
    assert all(0 < code < 126 for code in own)


def test_who_handles_what_is_gone_does_not_take_a_store_that_is_away_for_it():
    assert not issubclass(errors.NoStoreError, errors.NotFoundError)
    assert not issubclass(errors.NotFoundError, errors.NoStoreError)


def test_an_error_is_one_line_and_a_hint():
    error = errors.UnavailableError("no answer in 30 s", reason="timeout", hint="check the endpoint")
    assert (str(error), error.hint, error.reason) == ("no answer in 30 s", "check the endpoint", "timeout")
