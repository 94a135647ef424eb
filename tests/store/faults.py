"""A store that fails on purpose. A *fault* is a function that is given the request and decides what becomes of it.

    store = FaultyStore(MemoryStore(), rules(Rule("put", lost_answer, key=ends("pointer.json"), nth=2)))

Every operation asks the plan for a fault; without one the request goes through. Operations that change the store are
counted as effects once they succeeded; `crash_after=n` raises Crash right after the n-th effect, and for every call
after it, as a killed process would send nothing more. `calls` is the log of everything that was asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachefs.errors import ConditionConflict, ConditionFailed, DeniedError, StoreError, UnavailableError
from cachefs.store.base import (
    Buffer,
    Condition,
    ExpiryRule,
    Listing,
    ObjectInfo,
    ObjectStore,
    PartInfo,
    UploadInfo,
    VersionInfo,
)

EFFECTS = frozenset(
    {
        "put",
        "create_multipart",
        "upload_part",
        "complete_multipart",
        "abort_multipart",
        "delete_version",
        "probe_delete",
    }
)


class Crash(BaseException):
    """The process dies here; not an Exception, so that no handler in the code under test swallows it."""


@dataclass(frozen=True)
class Call:
    """One operation asked of the store. `key` is the prefix for listings, "" for check and versioning."""

    operation: str
    key: str
    version_id: str | None = None
    condition: Condition | None = None


Request = Callable[[], Any]
Fault = Callable[[Request], Any]
Plan = Callable[[Call], Fault | None]


def lost_request(request: Request) -> Any:
    """Drop the request on its way: nothing happens, the caller does not know that."""
    raise UnavailableError("fault: request lost", reason="timeout")


def lost_answer(request: Request) -> Any:
    """Let the request take its effect and drop the answer, good or bad."""
    try:
        request()
    except StoreError:
        pass
    raise UnavailableError("fault: answer lost", reason="reset")


def refused(error: Exception) -> Fault:
    """Raise `error` before any effect."""

    def fault(request: Request) -> Any:
        raise error

    return fault


throttled = refused(UnavailableError("fault: SlowDown", reason="throttled"))
expired = refused(UnavailableError("fault: ExpiredToken", reason="expired-credentials"))
denied = refused(DeniedError("fault: AccessDenied"))
precondition_failed = refused(ConditionFailed("fault: 412"))
conflict = refused(ConditionConflict("fault: 409"))


def crash_before(request: Request) -> Any:
    """Die before the request is sent."""
    raise Crash


def crash_after(request: Request) -> Any:
    """Die after the request took its effect."""
    request()
    raise Crash


def corrupted(request: Request) -> Any:
    """Flip one bit of what a read returns: get, get_range or get_stream; other results pass unchanged."""
    result = request()
    match result:
        case bytes():
            return _flip(result)
        case (info, bytes() as body):
            return info, _flip(body)
        case Iterator():
            return _flip_first(result)
    return result


def _flip(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:] if body else b"\0"


def _flip_first(chunks: Iterator[bytes]) -> Iterator[bytes]:
    for number, chunk in enumerate(chunks):
        yield chunk if number else _flip(chunk)


class Held:
    """A fault that keeps the request and times out; `release()` sends it later, as a delayed packet would arrive.

    With `duplicate` the request goes through at once and only a copy of it is kept.
    """

    def __init__(self, *, duplicate: bool = False) -> None:
        self._duplicate = duplicate
        self._requests: list[Request] = []
        self.caught = threading.Event()

    def __call__(self, request: Request) -> Any:
        self._requests.append(request)
        self.caught.set()
        if self._duplicate:
            return request()
        raise UnavailableError("fault: request held", reason="timeout")

    def release(self) -> Any:
        """Send the oldest request kept; return its result or raise its error."""
        return self._requests.pop(0)()


class Paused:
    """A fault that stops the caller before the request until `resume()`, like SIGSTOP between check and write."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def __call__(self, request: Request) -> Any:
        self.reached.set()
        if not self._go.wait(60):
            raise AssertionError("paused request was never resumed")
        return request()

    def resume(self) -> None:
        self._go.set()


def always(key: str) -> bool:
    return True


def ends(*suffixes: str) -> Callable[[str], bool]:
    """Return a key predicate: the key ends with one of `suffixes`."""
    return lambda key: key.endswith(suffixes)


@dataclass
class Rule:
    """Apply `fault` to the nth call (from 1) of `operation` ("*": any) whose key fits; nth=0 is every such call."""

    operation: str
    fault: Fault
    key: Callable[[str], bool] = always
    nth: int = 1
    seen: int = field(default=0, init=False)

    def matches(self, call: Call) -> bool:
        if self.operation not in ("*", call.operation) or not self.key(call.key):
            return False
        self.seen += 1
        return self.nth in (0, self.seen)


def rules(*given: Rule) -> Plan:
    """Return a plan: the first rule that matches decides."""

    def plan(call: Call) -> Fault | None:
        hits = [rule for rule in given if rule.matches(call)]
        return hits[0].fault if hits else None

    return plan


def no_faults(call: Call) -> Fault | None:
    return None


class FaultyStore:
    """Wraps any ObjectStore; see the module's head. `plan` and `crash_after` may be changed between calls."""

    def __init__(self, inner: ObjectStore, plan: Plan = no_faults, *, crash_after: int | None = None) -> None:
        self.inner = inner
        self.plan = plan
        self.crash_after = crash_after
        self.effects = 0
        self.dead = False
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def operations(self, key: Callable[[str], bool] = always) -> list[str]:
        """Return the names of the operations asked so far for keys that fit."""
        return [call.operation for call in self.calls if key(call.key)]

    def _do(self, call: Call, request: Request) -> Any:
        with self._lock:
            if self.dead:
                raise Crash
            self.calls.append(call)
            fault = self.plan(call)
        send = (lambda: self._effect(request)) if call.operation in EFFECTS else request
        return send() if fault is None else fault(send)

    def _effect(self, request: Request) -> Any:
        result = request()
        with self._lock:
            self.effects += 1
            if self.effects == self.crash_after:
                self.dead = True
                raise Crash
        return result

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def prefix(self) -> str:
        return self.inner.prefix

    def check(self) -> None:
        self._do(Call("check", ""), self.inner.check)

    def prepare(self) -> None:
        self._do(Call("prepare", ""), self.inner.prepare)

    def versioning(self) -> bool:
        return self._do(Call("versioning", ""), self.inner.versioning)

    def expiry_rules(self) -> Sequence[ExpiryRule]:
        return self._do(Call("expiry_rules", ""), self.inner.expiry_rules)

    def put(
        self,
        key: str,
        body: Buffer,
        *,
        condition: Condition | None,
        sha256: bytes | None = None,
        metadata: Mapping[str, str] = {},
    ) -> ObjectInfo:
        data = bytes(body)  # a held request must not see a buffer that is used again
        return self._do(
            Call("put", key, None, condition),
            lambda: self.inner.put(key, data, condition=condition, sha256=sha256, metadata=metadata),
        )

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] = {}) -> str:
        return self._do(Call("create_multipart", key), lambda: self.inner.create_multipart(key, metadata=metadata))

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer, *, sha256: bytes) -> str:
        data = bytes(body)
        return self._do(
            Call("upload_part", key), lambda: self.inner.upload_part(key, upload_id, number, data, sha256=sha256)
        )

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        return self._do(Call("list_parts", key), lambda: self.inner.list_parts(key, upload_id))

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartInfo], *, condition: Condition | None
    ) -> ObjectInfo:
        return self._do(
            Call("complete_multipart", key, None, condition),
            lambda: self.inner.complete_multipart(key, upload_id, parts, condition=condition),
        )

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._do(Call("abort_multipart", key), lambda: self.inner.abort_multipart(key, upload_id))

    def list_multiparts(self, prefix: str) -> list[UploadInfo]:
        return self._do(Call("list_multiparts", prefix), lambda: self.inner.list_multiparts(prefix))

    def head(self, key: str, version_id: str | None = None) -> ObjectInfo | None:
        return self._do(Call("head", key, version_id), lambda: self.inner.head(key, version_id))

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        return self._do(Call("get", key, version_id), lambda: self.inner.get(key, version_id))

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        return self._do(Call("get_stream", key, version_id), lambda: self.inner.get_stream(key, version_id))

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        return self._do(
            Call("get_range", key, version_id), lambda: self.inner.get_range(key, version_id, offset, length)
        )

    def list(self, prefix: str, *, delimiter: str = "") -> Listing:
        return self._do(Call("list", prefix), lambda: self.inner.list(prefix, delimiter=delimiter))

    def list_versions(self, prefix: str) -> Iterator[VersionInfo]:
        entries: Iterable[VersionInfo] = self._do(
            Call("list_versions", prefix), lambda: self.inner.list_versions(prefix)
        )
        return iter(entries)

    def delete_version(self, key: str, version_id: str) -> None:
        self._do(Call("delete_version", key, version_id), lambda: self.inner.delete_version(key, version_id))

    def probe_delete(self, key: str) -> None:
        self._do(Call("probe_delete", key), lambda: self.inner.probe_delete(key))
