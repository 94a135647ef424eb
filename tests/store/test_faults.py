"""The tool that other tests trust: a fault must do what its name says, before or after the effect."""

from __future__ import annotations

import threading

import pytest

from cachefs.errors import ConditionFailed, UnavailableError
from cachefs.store.base import CREATE_ONLY
from cachefs.store.memory import MemoryStore
from tests.store.faults import (
    Crash,
    FaultyStore,
    Held,
    Paused,
    Rule,
    corrupted,
    crash_after,
    crash_before,
    ends,
    lost_answer,
    lost_request,
    rules,
)


def put(store, key="a", body=b"body"):
    return store.put(key, body, condition=CREATE_ONLY)


def test_before_and_after_the_effect():
    store = FaultyStore(MemoryStore(), rules(Rule("put", lost_request), Rule("put", lost_answer, nth=2)))
    with pytest.raises(UnavailableError):
        put(store)
    assert store.inner.head("a") is None
    with pytest.raises(UnavailableError):
        put(store)
    assert store.inner.head("a") is not None
    with pytest.raises(ConditionFailed):
        put(store)
    assert store.operations() == ["put"] * 3


def test_only_the_key_and_the_call_asked_for():
    store = FaultyStore(MemoryStore(), rules(Rule("put", lost_request, key=ends("b"), nth=2)))
    put(store, "a")
    put(store, "b")
    put(store, "c")
    with pytest.raises(UnavailableError):
        put(store, "b")


def test_crashes():
    store = FaultyStore(MemoryStore(), rules(Rule("put", crash_before), Rule("put", crash_after, nth=2)))
    with pytest.raises(Crash):
        put(store)
    assert store.inner.head("a") is None
    with pytest.raises(Crash):
        put(store)
    assert store.inner.head("a") is not None


def test_dead_after_n_effects():
    store = FaultyStore(MemoryStore(), crash_after=2)
    put(store, "a")
    store.head("a")
    with pytest.raises(Crash):
        put(store, "b")
    assert store.inner.head("b") is not None
    with pytest.raises(Crash):
        store.head("a")
    assert not isinstance(Crash(), Exception)


def test_a_held_request_lands_late():
    held = Held()
    store = FaultyStore(MemoryStore(), rules(Rule("put", held)))
    body = bytearray(b"first")
    with pytest.raises(UnavailableError):
        put(store, body=body)
    body[:] = b"reuse"
    assert held.release().size == 5
    assert store.inner.get("a")[1] == b"first"


def test_a_duplicate_lands_late():
    held = Held(duplicate=True)
    store = FaultyStore(MemoryStore(), rules(Rule("put", held)))
    put(store)
    with pytest.raises(ConditionFailed):
        held.release()


def test_a_paused_request_waits():
    paused = Paused()
    store = FaultyStore(MemoryStore(), rules(Rule("put", paused)))
    thread = threading.Thread(target=put, args=(store,))
    thread.start()
    assert paused.reached.wait(30)
    assert store.inner.head("a") is None
    paused.resume()
    thread.join()
    assert store.inner.head("a") is not None


def test_reads_are_corrupted():
    inner = MemoryStore()
    version_id = put(inner).version_id
    store = FaultyStore(inner, rules(Rule("*", corrupted, nth=0)))
    assert store.get("a")[1] == b"cody"
    assert store.get_range("a", version_id, 1, 2) == b"nd"
    assert b"".join(store.get_stream("a", version_id)) == b"cody"
    assert store.head("a").size == 4
