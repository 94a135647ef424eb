"""Find out what a store really honours, before anything is published there.

Many stores accept conditional requests and ignore the condition. The probe asks, with the credentials and the prefix
that publication will use, every question that publication rests on (probechecks.py), some 120 small requests under
`<prefix>/.probe/<id>/`, and removes everything it wrote by version id.

A required check that fails, or that could not be answered, forbids publication: a lost answer is never a pass. Some
properties are capabilities instead, since cachefs can do without them:
- `ranges` (P8r): some stores ignore Range when a version is named. Readers then stream whole versions (get_stream) and
  verify length and hash, which is slower but as safe;
- `checksums` (P13): some stores accept any SHA-256 header. The restore test must then read the bytes, its default;
- the total size of an upload (P12), and creating over a delete marker (P16), for information.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from cachefs import clock
from cachefs.errors import CachefsError, DeniedError, UnavailableError
from cachefs.formats.keys import Keys
from cachefs.store.base import ObjectStore
from cachefs.store.probechecks import QUESTIONS, Bench, Question

TRIES = 3
WATCHED = frozenset({"P0", "P0e", "P1", "P2", "P5", "P6", "P8", "P8r"})
"""The checks that are repeated while a mount publishes: few requests, and none that only many at once can answer."""
LEFTOVER_AGE = 86400.0
"""Age, seconds by the store's clock, after which objects of an earlier probe are removed."""


class Outcome(StrEnum):
    """`advisory`: a capability is missing or clean-up was incomplete; `inconclusive`: nothing is known."""

    PASSED = "passed"
    FAILED = "failed"
    ADVISORY = "advisory"
    INCONCLUSIVE = "inconclusive"


class Check(msgspec.Struct, frozen=True):
    """The outcome of one check, P0 to P18 or PX, and one plain sentence of what it means."""

    id: str
    outcome: Outcome
    meaning: str


class ProbeReport(msgspec.Struct, frozen=True):
    """Everything the probe found out. `tries` counts runs; each after the first had a new prefix."""

    store: str
    checks: tuple[Check, ...]
    tries: int = 1

    @property
    def ok(self) -> bool:
        """Return whether it is safe to publish."""
        return not any(check.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE) for check in self.checks)

    @property
    def conclusive(self) -> bool:
        """Return whether the answer is final; otherwise the store did not answer, and probing again later may help."""
        return not _cut_short(self.checks)

    @property
    def ranges(self) -> bool:
        """Return whether a range of a pinned version can be read."""
        return self._passed("P8r")

    @property
    def checksums(self) -> bool:
        """Return whether the store verifies the SHA-256 sent with a body."""
        return self._passed("P13")

    def problems(self) -> tuple[Check, ...]:
        """Return every check that did not pass, the ones that forbid publication first."""
        found = [check for check in self.checks if check.outcome is not Outcome.PASSED]
        return tuple(sorted(found, key=lambda check: check.outcome is Outcome.ADVISORY))

    def _passed(self, ident: str) -> bool:
        return any(check.id == ident and check.outcome is Outcome.PASSED for check in self.checks)


def probe(store: ObjectStore) -> ProbeReport:
    """Probe a store; takes around a second near the store.

    A run that a transport error cuts short is repeated under a new prefix, at most TRIES runs in all. Raises nothing of
    CachefsError: what goes wrong is in the report.
    """
    keys = Keys(store.prefix)
    tries = 0
    while True:
        tries += 1
        prefix = keys.probe(clock.new_id())
        bench = Bench(store, prefix)
        checks = tuple(_answers(bench))
        checks += (_clean(store, prefix),)
        if tries == TRIES or not _cut_short(checks):
            return ProbeReport(store.url, checks, tries)


def watch_probe(store: ObjectStore) -> ProbeReport:
    """Ask again what a store that has passed the probe may have lost since: there may be another server behind the
    address, a gateway of another version, or versioning was suspended. Some 15 requests, one try. Raises as `probe`.
    """
    prefix = Keys(store.prefix).probe(clock.new_id())
    checks = tuple(_answers(Bench(store, prefix), [question for question in QUESTIONS if question.id in WATCHED]))
    return ProbeReport(store.url, (*checks, _clean(store, prefix)))


def _cut_short(checks: Iterable[Check]) -> bool:
    """Return whether something is not known that could still turn out well: one failure is enough for a verdict."""
    outcomes = {check.outcome for check in checks}
    return Outcome.INCONCLUSIVE in outcomes and Outcome.FAILED not in outcomes


def _answers(bench: Bench, questions: Iterable[Question] = QUESTIONS) -> Iterator[Check]:
    """Ask every question in order, until an answer is lost or there is no first version to ask about."""
    stopped = ""
    for question in questions:
        if stopped:
            yield Check(question.id, Outcome.INCONCLUSIVE, f"not asked: {stopped}")
            continue
        check = _answer(question, bench)
        if check.outcome is Outcome.INCONCLUSIVE:
            stopped = f"{question.id} got no answer"
        elif question.id == "P1" and check.outcome is not Outcome.PASSED:
            stopped = "P1 failed"
        yield check


def _answer(question: Question, bench: Bench) -> Check:
    bench.found = ""
    try:
        holds = question.ask(bench)
    except UnavailableError as error:
        return Check(question.id, Outcome.INCONCLUSIVE, f"no answer ({error.reason}): {error}")
    except CachefsError as error:
        # Without the right to ask for the bucket's versioning, P1 and P8 still show whether versions are kept. Rules of
        # expiry are unknown to many stores, which say so in various ways.
        denied = question.id == "P0" and isinstance(error, DeniedError)
        dispensable = question.capability or denied or question.id == "P0e"
        return Check(question.id, Outcome.ADVISORY if dispensable else Outcome.FAILED, f"could not be done: {error}")
    if holds:
        return Check(question.id, Outcome.PASSED, question.yes)
    meaning = f"{question.no}: {bench.found}" if bench.found else question.no
    return Check(question.id, Outcome.ADVISORY if question.capability else Outcome.FAILED, meaning)


def _clean(store: ObjectStore, prefix: str) -> Check:
    """Remove this probe's objects and uploads, and those that earlier probes left; say what stays."""
    probes = prefix.removesuffix("/").rpartition("/")[0] + "/"
    try:
        versions = list(store.list_versions(probes))
        uploads = store.list_multiparts(probes)
        own = [version.modified for version in versions if version.key.startswith(prefix)]
        old = max(own, default=0.0) - LEFTOVER_AGE  # by the store's clock only
        for version in versions:
            if version.key.startswith(prefix) or version.modified < old:
                store.delete_version(version.key, version.version_id)
        for upload in uploads:
            if upload.key.startswith(prefix) or upload.initiated < old:
                store.abort_multipart(upload.key, upload.upload_id)
        left = sum(1 for _ in store.list_versions(prefix)) + len(store.list_multiparts(prefix))
    except CachefsError as error:
        return Check("PX", Outcome.ADVISORY, f"the probe could not clean up under {prefix}: {error}")
    if left:
        return Check("PX", Outcome.ADVISORY, f"{left} objects of the probe cannot be removed from {prefix}")
    return Check("PX", Outcome.PASSED, "everything the probe wrote is removed")
