"""Pointer, history, manifests, runs: found through the pointer, read by version, checked."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from cachefs.errors import CorruptError, NotFoundError
from cachefs.formats.manifest import Order
from cachefs.formats.names import to_text
from cachefs.restore.listing import names, runs
from cachefs.restore.reader import find, history, load_manifest, read_pointer, versions
from cachefs.store.base import CREATE_ONLY
from tests.restore.make import KEYS, RUN, memory, move, publish
from tests.store.faults import FaultyStore


def test_history_names_each_generation_once_with_the_write_that_published_it() -> None:
    store = memory()
    move(store, kind="grant")
    first = publish(store, 1)
    move(store, kind="grant", epoch=2, owner="n1/y")
    second = publish(store, 2)
    move(store, kind="rollback", published=first, rollback_of=second.attempt)
    move(store, kind="grant", epoch=3)
    found = [(entry.published, entry.kind, entry.seq, entry.epoch) for entry in history(store, KEYS, RUN)]
    assert found == [(first, "rollback", 5, 2), (second, "promote", 4, 2), (first, "promote", 2, 1)]
    assert [entry.published for entry in history(store, KEYS, RUN, limit=2)] == [first, second]
    assert list(history(store, KEYS, "other")) == []


def test_find() -> None:
    store = memory()
    with pytest.raises(NotFoundError, match="no run 'exp/a'"):
        find(store, KEYS, RUN)
    move(store, kind="grant")
    with pytest.raises(NotFoundError, match="no published generation yet"):
        find(store, KEYS, RUN)
    first, second = publish(store, 1), publish(store, 2)
    again = publish(store, 3, generation="step-1")
    assert find(store, KEYS, RUN) == again
    assert find(store, KEYS, RUN, "step-2") == second
    assert find(store, KEYS, RUN, "step-1") == again != first
    with pytest.raises(NotFoundError) as caught:
        find(store, KEYS, RUN, "step-9")
    assert caught.value.hint == "published: step-1, step-2"


def test_history_ends_where_the_store_has_dropped_old_versions() -> None:
    store = memory()
    publish(store, 1)
    publish(store, 2)
    chain = list(versions(store, KEYS, RUN))
    store.delete_version(KEYS.pointer(RUN), chain[-1].version_id)
    assert [entry.published.generation for entry in history(store, KEYS, RUN)] == ["step-2"]


def test_a_pointer_of_another_run_is_refused() -> None:
    store = memory()
    publish(store, 1)
    found = store.get(KEYS.pointer(RUN))
    assert found is not None
    store.put(KEYS.pointer("copy"), found[1], condition=CREATE_ONLY)
    with pytest.raises(CorruptError, match="is not a pointer of run 'copy'"):
        read_pointer(store, KEYS, "copy")


def test_a_chain_that_was_tampered_with_is_refused() -> None:
    store = memory()
    publish(store, 1)
    publish(store, 2)
    key = KEYS.pointer(RUN)
    old = store._versions[key][0]
    assert old.info is not None
    other = msgspec.structs.replace(old.info, etag='"other"')
    store._versions[key][0] = msgspec.structs.replace(old, info=other)
    with pytest.raises(CorruptError, match="not the version its successor names"):
        list(versions(store, KEYS, RUN))


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_manifest_must_have_the_pinned_bytes(damage: str) -> None:
    """I3."""
    store = memory()
    published = publish(store, 1)
    load_manifest(store, RUN, published)
    pin = published.manifest
    if damage == "gone":
        store.delete_version(pin.key, pin.version_id)
    else:
        version = store._versions[pin.key][0]
        body = version.body.replace(b"step-1", b"step-2")
        store._versions[pin.key][0] = msgspec.structs.replace(version, body=body)
    with pytest.raises(CorruptError, match=pin.key):
        load_manifest(store, RUN, published)


def test_a_manifest_of_another_save_is_refused() -> None:
    store = memory()
    published = publish(store, 1)
    for wrong in (
        msgspec.structs.replace(published, generation="step-2"),
        msgspec.structs.replace(published, attempt="t2"),
        msgspec.structs.replace(published, order=Order(2, 1, 1)),
    ):
        with pytest.raises(CorruptError, match="another save"):
            load_manifest(store, RUN, wrong)
    with pytest.raises(CorruptError, match="another save"):
        load_manifest(store, "other", published)


def test_a_later_object_under_the_manifest_key_changes_nothing() -> None:
    """Readers use the pinned version, never the current one (race 27)."""
    store = memory()
    published = publish(store, 1)
    store.put(published.manifest.key, b"newer", condition=None)
    assert load_manifest(store, RUN, published).generation == "step-1"


def test_runs_are_listed_wherever_they_are() -> None:
    store = memory()
    given = ["a", "a/b", "exp/attempts", "exp/x y/loose", to_text(b"z%41\xff")]
    for name, step in zip(given, itertools.count(1), strict=False):
        publish(store, step, run=name)
    store.put(f"{KEYS.runs()}only/loose/log", b"", condition=None)
    store.put(KEYS.pointer("bad"), b"{}", condition=None)
    found = {run.name: run for run in runs(store, KEYS)}
    assert sorted(found) == sorted([*given, "bad"])
    assert found["bad"].seen is None
    assert "is not a valid Pointer" in found["bad"].error
    assert all(found[name].seen for name in given)


def test_listing_again_costs_what_is_new() -> None:
    """Known runs are left out; directories that are no runs, and new ones, are listed."""
    store = FaultyStore(memory())
    for step in range(1, 101):
        publish(store, step, run=f"exp/{step}")
    known = set(names(store, KEYS))
    assert len(known) == 100
    publish(store, 101, run="exp/new")
    store.calls.clear()
    assert list(names(store, KEYS, known=known)) == ["exp/new"]
    assert store.operations() == ["list"] * 3
