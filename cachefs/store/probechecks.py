"""The checks of the store probe: one function each, asking one question of the store under a prefix of its own.

A check returns whether the store honours what it is about. Any error it raises ends the check; UnavailableError means
that nothing is known. Bodies are never equal, since ETags of equal bodies are, and a second writer would go unnoticed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from cachefs import clock
from cachefs.errors import BadPart, ConditionConflict, ConditionFailed, CorruptError, StoreError, UnavailableError
from cachefs.formats.keys import Keys
from cachefs.store.base import CREATE_ONLY, HISTORY, Condition, ExpiryRule, ObjectInfo, ObjectStore, PartInfo

WRITERS = 8
ROUNDS = 3
_WRITE_ID = "write-id"


class Bench:
    """What the checks of one run share: the store, the prefix, and the versions that earlier checks made."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store = store
        self.a = prefix + "a"
        self.b = prefix + "b"
        self.prefix = prefix
        self.write_id = clock.new_id()
        self.first_body = self.body()
        self.first: ObjectInfo | None = None
        self.second: ObjectInfo | None = None
        self.multipart_body = b""
        self.found = ""
        """What was found, for the answer no of the check that is under way."""

    @staticmethod
    def body() -> bytes:
        """Return a body that was never used."""
        return f"probe {clock.new_id()}".encode()

    def put(self, key: str, condition: Condition, body: bytes | None = None) -> ObjectInfo:
        """Write a new body under a condition."""
        return self.store.put(key, body or self.body(), condition=condition, metadata={_WRITE_ID: self.write_id})

    def content(self, key: str, version_id: str | None = None) -> bytes | None:
        """Return an object's bytes."""
        found = self.store.get(key, version_id)
        return found[1] if found else None

    def upload(self, key: str, body: bytes, *, announced: int | None = None) -> ObjectInfo:
        """Create an object by a multipart upload of one part; `announced` is the size told at its completion."""
        digest = hashlib.sha256(body).digest()
        upload_id = self.store.create_multipart(key, metadata={_WRITE_ID: self.write_id})
        etag = self.store.upload_part(key, upload_id, 1, body, sha256=digest)
        size = len(body) if announced is None else announced
        return self.store.complete_multipart(key, upload_id, [PartInfo(1, etag, size, digest)], condition=CREATE_ONLY)


def _first(bench: Bench) -> ObjectInfo:
    if bench.first is None:
        raise LookupError("P1 is asked first, and nothing after it unless it passed")
    return bench.first


def _refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except (ConditionFailed, ConditionConflict):
        return True
    return False


def _versioning(bench: Bench) -> bool:
    return bench.store.versioning()


def _keeps_objects(bench: Bench) -> bool:
    harmful = [rule for rule in bench.store.expiry_rules() if _may_delete(rule, Keys(bench.store.prefix).runs())]
    bench.found = ", ".join(repr(rule.id or rule.prefix) for rule in harmful)
    return not harmful


def _may_delete(rule: ExpiryRule, runs: str) -> bool:
    """Return whether a rule may delete what is published: objects of attempts, which are old versions once a delete
    marker lies on them, or the history of pointers.
    """
    if not (rule.prefix.startswith(runs) or runs.startswith(rule.prefix)):
        return False
    return rule.expires or (rule.keeps is not None and rule.keeps < HISTORY)


def _create(bench: Bench) -> bool:
    bench.first = bench.put(bench.a, CREATE_ONLY, bench.first_body)
    return bench.first.version_id not in ("", "null")


def _create_again(bench: Bench) -> bool:
    _first(bench)
    return _refused(lambda: bench.put(bench.a, CREATE_ONLY))


def _unchanged(bench: Bench) -> bool:
    _first(bench)
    found = bench.store.get(bench.a)
    return found is not None and found[1] == bench.first_body and found[0].metadata.get(_WRITE_ID) == bench.write_id


def _swap_wrong(bench: Bench) -> bool:
    _first(bench)
    wrong = f'"{hashlib.md5(bench.body(), usedforsecurity=False).hexdigest()}"'
    return _refused(lambda: bench.put(bench.a, Condition(if_match=wrong)))


def _swap(bench: Bench) -> bool:
    etag = _first(bench).etag
    try:
        bench.second = bench.put(bench.a, Condition(if_match=etag))
    except (ConditionFailed, ConditionConflict):
        return False
    return bench.second.etag != etag


def _swap_stale(bench: Bench) -> bool:
    etag = _first(bench).etag
    return _refused(lambda: bench.put(bench.a, Condition(if_match=etag)))


def _swap_absent(bench: Bench) -> bool:
    key = bench.prefix + "absent"
    etag = _first(bench).etag
    return _refused(lambda: bench.put(key, Condition(if_match=etag))) and bench.store.head(key) is None


def _old_version(bench: Bench) -> bool:
    version_id = _first(bench).version_id
    streamed = b"".join(bench.store.get_stream(bench.a, version_id))
    return bench.content(bench.a, version_id) == bench.first_body == streamed


def _old_range(bench: Bench) -> bool:
    try:
        return bench.store.get_range(bench.a, _first(bench).version_id, 2, 4) == bench.first_body[2:6]
    except CorruptError:
        return False


def _multipart(bench: Bench) -> bool:
    bench.multipart_body = bench.body()
    return bench.upload(bench.b, bench.multipart_body).version_id not in ("", "null")


def _multipart_again(bench: Bench) -> bool:
    return _refused(lambda: bench.upload(bench.b, bench.body())) and bench.content(bench.b) == bench.multipart_body


def _multipart_metadata(bench: Bench) -> bool:
    info = bench.store.head(bench.b)
    return info is not None and info.metadata.get(_WRITE_ID) == bench.write_id


def _wrong_size(bench: Bench) -> bool:
    body = bench.body()
    try:
        bench.upload(bench.prefix + "size", body, announced=len(body) + 1)
    except UnavailableError:
        raise
    except StoreError:
        return True
    return False


def _wrong_hash(bench: Bench) -> bool:
    wrong = hashlib.sha256(bench.body()).digest()
    try:
        bench.store.put(bench.prefix + "hash", bench.body(), condition=CREATE_ONLY, sha256=wrong)
    except BadPart:
        return True
    return False


def _swap_over_marker(bench: Bench) -> bool:
    etag = (bench.second or _first(bench)).etag
    bench.store.probe_delete(bench.a)
    return _refused(lambda: bench.put(bench.a, Condition(if_match=etag)))


def _version_under_marker(bench: Bench) -> bool:
    return bench.content(bench.a, _first(bench).version_id) == bench.first_body


def _create_over_marker(bench: Bench) -> bool:
    key = bench.prefix + "again"  # its own: a broken P14 would have covered the marker on `a`
    bench.put(key, CREATE_ONLY)
    bench.store.probe_delete(key)
    return not _refused(lambda: bench.put(key, CREATE_ONLY))


def _race_create(bench: Bench) -> bool:
    return all(_one_winner(bench, f"{bench.prefix}race-{number}", CREATE_ONLY, 1) for number in range(ROUNDS))


def _race_swap(bench: Bench) -> bool:
    def one(number: int) -> bool:
        key = f"{bench.prefix}swap-{number}"
        start = bench.put(key, CREATE_ONLY)
        return _one_winner(bench, key, Condition(if_match=start.etag), 2)

    return all(one(number) for number in range(ROUNDS))


def _one_winner(bench: Bench, key: str, condition: Condition, versions: int) -> bool:
    """Let all writers write at once; return whether exactly one won and the store holds exactly `versions` versions."""
    barrier = threading.Barrier(WRITERS)

    def write(number: int) -> bool:
        barrier.wait(60)
        return not _refused(lambda: bench.put(key, condition))

    with ThreadPoolExecutor(WRITERS) as pool:
        won: Sequence[bool] = [future.result() for future in [pool.submit(write, n) for n in range(WRITERS)]]
    held = sum(version.key == key for version in bench.store.list_versions(key))
    return sum(won) == 1 and held == versions


class Question(NamedTuple):
    """One check. `capability` names what is lost, without refusing to publish, when the answer is no."""

    id: str
    ask: Callable[[Bench], bool]
    yes: str
    no: str
    capability: str = ""


QUESTIONS = (
    Question("P0", _versioning, "versioning is enabled", "versioning is off or suspended: nothing can be pinned"),
    Question(
        "P0e",
        _keeps_objects,
        "no rule of the bucket deletes what is published",
        "lifecycle rules of the bucket delete what is published (cachefs policy --what lifecycle prints safe ones)",
    ),
    Question("P1", _create, "a create-only write gives a version id", "writes give no version ids"),
    Question("P2", _create_again, "a second create is refused", "create-only writes overwrite (If-None-Match ignored)"),
    Question(
        "P3", _unchanged, "a refused create changes nothing", "a refused create changed the object or its metadata"
    ),
    Question("P4", _swap_wrong, "a swap with a wrong ETag is refused", "a wrong ETag is accepted (If-Match ignored)"),
    Question("P5", _swap, "a swap with the current ETag succeeds", "a swap with the ETag the store gave is refused"),
    Question("P6", _swap_stale, "a swap with an old ETag is refused", "an ETag of an earlier version is accepted"),
    Question("P7", _swap_absent, "a swap of nothing is refused", "If-Match creates an object that is not there"),
    Question("P8", _old_version, "an earlier version can be read", "reading an earlier version gives other bytes"),
    Question(
        "P8r",
        _old_range,
        "a range of an earlier version can be read",
        "ranges of a version are ignored: readers take whole versions instead",
        "ranges",
    ),
    Question("P9", _multipart, "a multipart upload gives a version id", "multipart uploads give no version ids"),
    Question("P10", _multipart_again, "a second upload is refused", "uploads overwrite (If-None-Match ignored)"),
    Question(
        "P11", _multipart_metadata, "uploads keep their metadata", "uploads lose the metadata given at their start"
    ),
    Question(
        "P12",
        _wrong_size,
        "a wrong total size is refused",
        "the total size of an upload is not checked",
        "upload sizes",
    ),
    Question(
        "P13",
        _wrong_hash,
        "a wrong SHA-256 is refused",
        "SHA-256 checksums are not verified by the store: the restore test must read the bytes",
        "checksums",
    ),
    Question("P14", _swap_over_marker, "a swap over a delete marker is refused", "a delete marker disables If-Match"),
    Question("P15", _version_under_marker, "versions outlive a delete marker", "a delete marker hides pinned versions"),
    Question(
        "P16",
        _create_over_marker,
        "a create over a delete marker succeeds, as on AWS",
        "a create over a delete marker is refused: a deleted key cannot be written again",
        "re-creation",
    ),
    Question(
        "P17", _race_create, "one of 8 creates at once wins", "creates at once are not atomic: several won, or none"
    ),
    Question("P18", _race_swap, "one of 8 swaps at once wins", "swaps at once are not atomic: several won, or none"),
)
