"""The probe must find every store that ignores what publication relies on, and leave nothing behind."""

from __future__ import annotations

import threading
from contextlib import closing, contextmanager

import msgspec
import pytest

from cachefs import policy
from cachefs.errors import BadPart, ConditionFailed, CorruptError, DeniedError, ProbeError, Unsupported
from cachefs.store.base import Condition, ExpiryRule
from cachefs.store.directory import DirectoryStore
from cachefs.store.memory import MemoryStore
from cachefs.store.probe import TRIES, Outcome, probe, watch_probe
from cachefs.store.probechecks import QUESTIONS
from tests.store.faults import FaultyStore, Rule, ends, expired, lost_answer, lost_request, refused, rules

EXPECTED = {
    # the backends as they are: what the probe says about each
    "memory": {},
    "directory": {},
    "moto": {"P12": Outcome.ADVISORY, "P13": Outcome.ADVISORY},
    "ministack": {"P8r": Outcome.ADVISORY},
}


def failed(report) -> set[str]:
    return {check.id for check in report.checks if check.outcome is Outcome.FAILED}


def other(report) -> dict[str, Outcome]:
    return {check.id: check.outcome for check in report.problems()}


def is_empty(store) -> bool:
    return not list(store.list_versions("")) and not store.list_multiparts("")


def test_the_backends_as_they_are(store, backend):
    report = probe(store)
    assert other(report) == EXPECTED[backend.name]
    assert report.ok
    assert report.conclusive
    assert report.tries == 1
    assert report.ranges == backend.ranges_of_versions
    assert report.checksums == backend.verifies_sha256
    assert [check.id for check in report.checks] == [question.id for question in QUESTIONS] + ["PX"]
    assert is_empty(store)


class Wrapped(MemoryStore):
    """Base of the faulty stores below: each breaks one promise that a real store was seen to break."""


class IgnoresCreateOnly(Wrapped):
    def put(self, key, body, *, condition, **rest):
        return super().put(key, body, condition=condition if condition and condition.if_match else None, **rest)

    def complete_multipart(self, key, upload_id, parts, *, condition):
        return super().complete_multipart(key, upload_id, parts, condition=None)


class IgnoresCreateOnlyOfUploads(Wrapped):
    def complete_multipart(self, key, upload_id, parts, *, condition):
        return super().complete_multipart(key, upload_id, parts, condition=None)


class IgnoresIfMatch(Wrapped):
    def put(self, key, body, *, condition, **rest):
        return super().put(key, body, condition=condition if condition and condition.if_none_match else None, **rest)


class RefusesEveryIfMatch(Wrapped):
    """As a store that compares the quoted ETag with its own unquoted one."""

    def put(self, key, body, *, condition, **rest):
        if condition and condition.if_match:
            raise ConditionFailed("412")
        return super().put(key, body, condition=condition, **rest)


class AcceptsEveryKnownETag(Wrapped):
    def put(self, key, body, *, condition, **rest):
        etags = [self.head(key, version.version_id).etag for version in self.list_versions(key) if version.size]
        if condition and condition.if_match in etags and (current := self.head(key)):
            condition = Condition(if_match=current.etag)
        return super().put(key, body, condition=condition, **rest)


class SwapsNothingIntoBeing(Wrapped):
    def put(self, key, body, *, condition, **rest):
        if condition and condition.if_match and not list(self.list_versions(key)):
            condition = None
        return super().put(key, body, condition=condition, **rest)


class MarkerDisablesConditions(Wrapped):
    def put(self, key, body, *, condition, **rest):
        if any(version.is_marker and version.is_latest for version in self.list_versions(key)):
            condition = None
        return super().put(key, body, condition=condition, **rest)


class RefusesCreateOverMarker(Wrapped):
    def put(self, key, body, *, condition, **rest):
        if condition and condition.if_none_match and list(self.list_versions(key)):
            raise ConditionFailed("412")
        return super().put(key, body, condition=condition, **rest)


class MarkerHidesVersions(Wrapped):
    def _hidden(self, key):
        return self.head(key) is None

    def get(self, key, version_id=None):
        return None if self._hidden(key) else super().get(key, version_id)


class Unversioned(Wrapped):
    def versioning(self):
        return False

    def put(self, key, body, **rest):
        super().put(key, body, **rest)
        raise ProbeError("no version ids")


class Suspended(Wrapped):
    def versioning(self):
        return False


class Expires(Wrapped):
    """Has a lifecycle rule."""

    def __init__(self, *args, prefix="p/runs/", expires=False, keeps=None):
        super().__init__(*args)
        self._rules = (ExpiryRule("tidy", prefix, expires, keeps),)

    def expiry_rules(self):
        return self._rules


class HasNoRules(Wrapped):
    def expiry_rules(self):
        raise Unsupported("501")


class KeepsRulesSecret(Wrapped):
    def expiry_rules(self):
        raise DeniedError("403")


class ReadsCurrentOnly(Wrapped):
    """Ignores the version id of a read."""

    def get(self, key, version_id=None):
        return super().get(key)


class IgnoresRanges(Wrapped):
    def get_range(self, key, version_id, offset, length):
        raise CorruptError("200 without a range")


class DropsMetadata(Wrapped):
    def put(self, key, body, *, metadata={}, **rest):  # noqa: B006
        return super().put(key, body, **rest)


class DropsMetadataOfUploads(Wrapped):
    def create_multipart(self, key, *, metadata={}):  # noqa: B006
        return super().create_multipart(key)


class ChecksNothing(Wrapped):
    def put(self, key, body, *, sha256=None, **rest):
        return super().put(key, body, **rest)

    def complete_multipart(self, key, upload_id, parts, *, condition):
        held = self.list_parts(key, upload_id)
        return super().complete_multipart(key, upload_id, held, condition=condition)


class NotAtomic(Wrapped):
    """Checks the condition, waits for the other writers to have checked it too, and only then writes.

    Alone it behaves well: what a store does that checks and writes in two steps.
    """

    def __init__(self, *args, kind: str, **kwargs):
        super().__init__(*args, **kwargs)
        self._kind = kind
        self._meet = threading.Barrier(8)

    def put(self, key, body, *, condition, **rest):
        raced = ("race-" if self._kind == "create" else "swap-") in key
        if raced and condition and condition.if_none_match == (self._kind == "create"):
            current = self.head(key)
            fits = condition.holds(current.etag if current else None)
            self._meet.wait(30)
            if not fits:
                raise ConditionFailed("412")
            condition = None
        return super().put(key, body, condition=condition, **rest)


@pytest.mark.parametrize(
    ("store", "caught", "advised"),
    [
        (IgnoresCreateOnly("p"), {"P2", "P3", "P5", "P10", "P17"}, set()),
        (IgnoresCreateOnlyOfUploads("p"), {"P10"}, set()),
        (IgnoresIfMatch("p"), {"P4", "P6", "P7", "P14", "P18"}, set()),
        (RefusesEveryIfMatch("p"), {"P5", "P18"}, set()),
        (AcceptsEveryKnownETag("p"), {"P6", "P18"}, set()),
        (SwapsNothingIntoBeing("p"), {"P7"}, set()),
        (MarkerDisablesConditions("p"), {"P14"}, set()),
        (RefusesCreateOverMarker("p"), set(), {"P16"}),
        (MarkerHidesVersions("p"), {"P15"}, set()),
        (Unversioned("p"), {"P0", "P1"}, set()),
        (Suspended("p"), {"P0"}, set()),
        (Expires("p", expires=True), {"P0e"}, set()),
        (Expires("p", expires=True, prefix=""), {"P0e"}, set()),
        (Expires("p", expires=True, prefix="p/runs/exp/attempts/"), {"P0e"}, set()),
        (Expires("p", expires=True, prefix="p/.probe/"), set(), set()),
        (Expires("p", expires=True, prefix="p/other/"), set(), set()),
        (Expires("p", expires=True, prefix="pq/"), set(), set()),
        (Expires("p", keeps=0), {"P0e"}, set()),
        (Expires("p", keeps=99), {"P0e"}, set()),
        (Expires("p", keeps=100), set(), set()),
        (Expires("p"), set(), set()),
        (HasNoRules("p"), set(), {"P0e"}),
        (KeepsRulesSecret("p"), set(), {"P0e"}),
        (ReadsCurrentOnly("p"), {"P8", "P15"}, set()),
        (IgnoresRanges("p"), set(), {"P8r"}),
        (DropsMetadata("p"), {"P3"}, set()),
        (DropsMetadataOfUploads("p"), {"P11"}, set()),
        (ChecksNothing("p"), set(), {"P12", "P13"}),
        (NotAtomic("p", kind="create"), {"P17"}, set()),
        (NotAtomic("p", kind="swap"), {"P18"}, set()),
    ],
    ids=lambda value: type(value).__name__ + getattr(value, "_kind", "") if isinstance(value, MemoryStore) else "",
)
def test_each_fault_is_caught_by_its_check(store, caught, advised):
    report = probe(store)
    assert failed(report) == caught
    assert {check.id for check in report.checks if check.outcome is Outcome.ADVISORY} == advised
    assert report.ok == (not caught)
    assert report.conclusive
    assert report.tries == 1
    assert is_empty(store)


WATCH = ("P0", "P0e", "P1", "P2", "P5", "P6", "P8", "P8r")


@pytest.mark.parametrize(
    ("store", "caught"),
    [
        (MemoryStore("p"), set()),
        (IgnoresCreateOnly("p"), {"P2", "P5"}),
        (IgnoresIfMatch("p"), {"P6"}),
        (RefusesEveryIfMatch("p"), {"P5"}),
        (AcceptsEveryKnownETag("p"), {"P6"}),
        (Unversioned("p"), {"P0", "P1"}),
        (Suspended("p"), {"P0"}),
        (Expires("p", expires=True), {"P0e"}),
        (ReadsCurrentOnly("p"), {"P8"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MemoryStore) else "",
)
def test_the_watch_catches_what_a_store_loses(store, caught):
    faulty = FaultyStore(store)
    report = watch_probe(faulty)
    assert failed(report) == caught
    assert report.ok == (not caught)
    assert report.conclusive
    assert is_empty(store)
    assert len(faulty.calls) <= 17
    assert not [call for call in faulty.calls if call.operation == "probe_delete"]


def test_the_watch_on_the_backends(store, backend):
    report = watch_probe(store)
    assert [check.id for check in report.checks] == [*WATCH, "PX"]
    assert report.ok
    assert report.ranges == backend.ranges_of_versions
    assert is_empty(store)


@pytest.mark.parametrize("fault", [lost_request, lost_answer, expired])
def test_a_watch_without_an_answer_is_no_verdict(fault):
    store = FaultyStore(MemoryStore("p"), rules(Rule("put", fault, nth=2)))
    report = watch_probe(store)
    assert not report.conclusive
    assert not report.ok
    assert is_empty(store.inner)


def test_capabilities():
    assert not probe(IgnoresRanges()).ranges
    assert not probe(ChecksNothing()).checksums


@contextmanager
def stripped(store, *headers):
    """Remove headers from every request before it is signed: a store that ignores them, over the real wire."""

    def strip(request, **_):
        for name in headers:
            del request.headers[name]

    clients = (store._once, store._bulk, store._patient)
    for client in clients:
        client.meta.events.register("before-sign.s3", strip)
    yield store
    for client in clients:
        client.meta.events.unregister("before-sign.s3", strip)


@pytest.mark.server
@pytest.mark.parametrize(
    ("header", "caught"),
    [
        ("If-None-Match", {"P2", "P3", "P5", "P10", "P17"}),
        ("If-Match", {"P4", "P6", "P7", "P14", "P18"}),
    ],
)
@pytest.mark.parametrize("name", ["moto", "ministack"])
def test_ignored_headers_over_the_wire(request, name, header, caught):
    server = request.getfixturevalue(f"{name}_server")
    with server.store(server.bucket(), "p") as store, stripped(store, header):
        assert failed(probe(store)) == caught
        assert is_empty(store)


@pytest.mark.server
@pytest.mark.parametrize("name", ["moto", "ministack"])
def test_an_unversioned_bucket(request, name):
    server = request.getfixturevalue(f"{name}_server")
    with server.store(server.bucket(versioned=False), "p") as store:
        report = probe(store)
        assert failed(report) == {"P0", "P1"}
        assert not report.ok
        assert is_empty(store)


EXPIRY = {
    "days": ({"Filter": {"Prefix": "p/"}, "Expiration": {"Days": 30}}, True),
    "a date, everywhere": ({"Filter": {"Prefix": ""}, "Expiration": {"Date": "2040-01-01T00:00:00Z"}}, True),
    "a prefix of the old kind": ({"Prefix": "p/runs/", "Expiration": {"Days": 30}}, True),
    "old versions": ({"Filter": {"Prefix": "p/"}, "NoncurrentVersionExpiration": {"NoncurrentDays": 30}}, True),
    "large ones": (
        {"Filter": {"And": {"Prefix": "p/", "ObjectSizeGreaterThan": 500}}, "Expiration": {"Days": 30}},
        True,
    ),
    "elsewhere": ({"Filter": {"Prefix": "other/"}, "Expiration": {"Days": 30}}, False),
    "with a tag": ({"Filter": {"Tag": {"Key": "k", "Value": "v"}}, "Expiration": {"Days": 30}}, False),
    "with a tag below": (
        {"Filter": {"And": {"Prefix": "p/", "Tags": [{"Key": "k", "Value": "v"}]}}, "Expiration": {"Days": 30}},
        False,
    ),
    "disabled": ({"Filter": {"Prefix": "p/"}, "Expiration": {"Days": 30}, "Status": "Disabled"}, False),
    "markers": ({"Filter": {"Prefix": "p/"}, "Expiration": {"ExpiredObjectDeleteMarker": True}}, False),
    "uploads": ({"Filter": {"Prefix": "p/"}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}, False),
}


@pytest.mark.server
@pytest.mark.parametrize(("rule", "harmful"), EXPIRY.values(), ids=EXPIRY)
def test_a_rule_that_deletes_what_is_published(moto_server, rule, harmful):
    bucket = moto_server.bucket()
    with closing(moto_server.session().client("s3", endpoint_url=moto_server.endpoint_url)) as client:
        rules = {"Rules": [{"ID": "tidy", "Status": "Enabled", **rule}]}
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    with moto_server.store(bucket, "p") as store:
        (check,) = [check for check in watch_probe(store).checks if check.id == "P0e"]
    assert (check.outcome is Outcome.FAILED) == harmful
    assert ("'tidy'" in check.meaning) == harmful


@pytest.mark.server
@pytest.mark.parametrize("name", ["moto", "ministack"])
def test_our_own_rules_are_harmless(request, name):
    """Unless the store drops the number of old versions that they keep: then they are not."""
    server = request.getfixturevalue(f"{name}_server")
    bucket = server.bucket()
    with closing(server.session().client("s3", endpoint_url=server.endpoint_url)) as client:
        ours = policy.lifecycle(policy.Place(bucket, "p"))
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=ours)
        held = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    whole = any("NewerNoncurrentVersions" in rule.get("NoncurrentVersionExpiration", {}) for rule in held)
    with server.store(bucket, "p") as store:
        assert watch_probe(store).ok == whole


@pytest.mark.parametrize("fault", [lost_request, lost_answer, expired], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("nth", [1, 2, 12])
def test_one_transport_error_is_asked_again(fault, nth):
    store = FaultyStore(MemoryStore("p"), rules(Rule("put", fault, nth=nth)))
    report = probe(store)
    assert report.ok
    assert report.tries == 2
    prefixes = {call.key.split("/")[2] for call in store.calls if call.operation == "put"}
    assert len(prefixes) == 2
    assert is_empty(store.inner)


@pytest.mark.parametrize("operation", ["versioning", "put", "get", "get_range", "complete_multipart", "probe_delete"])
def test_a_store_that_does_not_answer_is_never_trusted(operation):
    store = FaultyStore(MemoryStore("p"), rules(Rule(operation, lost_request, nth=0)))
    report = probe(store)
    assert not report.ok
    assert not report.conclusive
    assert report.tries == TRIES
    assert not failed(report)
    assert report.problems()
    assert is_empty(store.inner)


def test_what_the_credentials_may_not_do():
    denied = refused(DeniedError("403"))
    assert probe(FaultyStore(MemoryStore(), rules(Rule("versioning", denied, nth=0)))).ok
    assert failed(probe(FaultyStore(MemoryStore(), rules(Rule("get", denied, nth=0))))) >= {"P3", "P8", "P15"}
    report = probe(FaultyStore(MemoryStore(), rules(Rule("put", denied, nth=0))))
    assert failed(report) == {"P1"}
    assert report.conclusive


def test_operations_the_store_does_not_know():
    unknown = refused(Unsupported("501"))
    report = probe(FaultyStore(MemoryStore(), rules(Rule("create_multipart", unknown, nth=0))))
    assert failed(report) == {"P9", "P10", "P11"}


def test_checksums_refused_for_another_reason_are_no_checksums():
    store = FaultyStore(MemoryStore(), rules(Rule("put", refused(Unsupported("501")), key=ends("hash"))))
    report = probe(store)
    assert report.ok
    assert not report.checksums


def test_clean_up_that_fails_is_told():
    report = probe(FaultyStore(MemoryStore(), rules(Rule("delete_version", refused(DeniedError("403")), nth=0))))
    assert other(report) == {"PX": Outcome.ADVISORY}
    assert report.ok


def test_leftovers_of_dead_probes_are_swept():
    now = [1000.0]
    store = MemoryStore("p", now=lambda: now[0])
    store.put("p/.probe/old/a", b"1", condition=None)
    store.create_multipart("p/.probe/old/m")
    store.put("p/runs/r/pointer.json", b"1", condition=None)
    now[0] += 86401.0
    store.put("p/.probe/running/a", b"1", condition=None)
    assert probe(store).ok
    assert store.list("p/").keys == ("p/.probe/running/a", "p/runs/r/pointer.json")
    assert store.list_multiparts("p/") == []


def test_reports_travel_as_json():
    report = probe(MemoryStore("p"))
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report
    assert report.store == "memory://memory/p"


def test_probing_a_directory_that_is_gone(tmp_path):
    report = probe(DirectoryStore(str(tmp_path / "gone")))
    assert not report.ok
    assert not (tmp_path / "gone").exists()


def test_bad_part_is_the_only_proof_of_checksums():
    store = FaultyStore(MemoryStore(), rules(Rule("put", refused(BadPart("400")), key=ends("hash"))))
    assert probe(store).checksums
