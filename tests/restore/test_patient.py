"""Reads that are tried again: the bytes are those of one read, and an outage ends with its error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cachefs.errors import CorruptError, UnavailableError
from cachefs.restore.patient import PAUSE_MOST, TRIES, PatientReads
from cachefs.store.base import CREATE_ONLY, STREAM_CHUNK
from cachefs.store.memory import MemoryStore
from tests.store.faults import FaultyStore, Rule, lost_request, rules

BODY = bytes(range(251)) * (3 * STREAM_CHUNK // 251)


class Breaking(MemoryStore):
    """Its streams break after each of `pieces`, in bytes; those after the last one are whole."""

    def __init__(self, *pieces: int) -> None:
        super().__init__("p")
        self.version = self.put("k", BODY, condition=CREATE_ONLY).version_id
        self.pieces = list(pieces)

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        stream = super().get_stream(key, version_id)
        return self._broken(stream, self.pieces.pop(0)) if self.pieces else stream

    @staticmethod
    def _broken(stream: Iterator[bytes], left: int) -> Iterator[bytes]:
        for chunk in stream:
            if left < len(chunk):
                yield chunk[:left]
                raise UnavailableError("reset", reason="reset")
            left -= len(chunk)
            yield chunk


@pytest.mark.parametrize("pieces", [(), (0,), (1, 2, 3), (STREAM_CHUNK,), (2 * STREAM_CHUNK + 7, 5, STREAM_CHUNK - 1)])
def test_a_stream_that_breaks_gives_the_same_bytes(pieces: tuple[int, ...]) -> None:
    store, pauses = Breaking(*pieces), []
    assert b"".join(PatientReads(store, sleep=pauses.append).get_stream("k", store.version)) == BODY
    assert len(pauses) == len(pieces)


def test_a_stream_that_goes_on_may_break_often() -> None:
    store = Breaking(*(1000 * number for number in range(1, 3 * TRIES)))
    assert b"".join(PatientReads(store, sleep=lambda _: None).get_stream("k", store.version)) == BODY


def test_a_stream_that_brings_nothing_more_ends_with_the_error() -> None:
    store, pauses = Breaking(*[1000] * (TRIES + 5)), []
    stream = PatientReads(store, sleep=pauses.append).get_stream("k", store.version)
    with pytest.raises(UnavailableError):
        list(stream)
    assert len(pauses) == TRIES - 1
    assert max(pauses) <= PAUSE_MOST


@pytest.mark.parametrize("operation", ["get", "head", "get_range", "list", "get_stream"])
def test_every_read_is_tried_again(operation: str) -> None:
    inner = MemoryStore("p")
    version = inner.put("k", b"body", condition=CREATE_ONLY).version_id
    store = FaultyStore(inner, rules(*(Rule(operation, lost_request, nth=nth) for nth in range(1, TRIES))))
    patient = PatientReads(store, sleep=lambda _: None)
    found = {
        "get": lambda: patient.get("k", version),
        "head": lambda: patient.head("k", version),
        "get_range": lambda: patient.get_range("k", version, 1, 2),
        "list": lambda: patient.list(""),
        "get_stream": lambda: b"".join(patient.get_stream("k", version)),
    }[operation]()
    assert found
    assert len(store.calls) == TRIES


def test_an_outage_ends_with_its_error() -> None:
    store = FaultyStore(MemoryStore("p"), rules(Rule("head", lost_request, nth=0)))
    with pytest.raises(UnavailableError):
        PatientReads(store, sleep=lambda _: None).head("k")
    assert len(store.calls) == TRIES


def test_other_errors_are_not_tried_again() -> None:
    def corrupt(_: object) -> None:
        raise CorruptError("other bytes")

    store = FaultyStore(MemoryStore("p"), rules(Rule("get", corrupt, nth=0)))
    with pytest.raises(CorruptError):
        PatientReads(store).get("k")
    assert len(store.calls) == 1
