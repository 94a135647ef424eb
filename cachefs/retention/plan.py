"""What stays of a run, and what may go: pure, decided on one complete view of the run.

Kept are what is published and the generation before it, the last `keep_last`, the newest of each hour and of each day
for as long as the policy says, what a reader holds a lease on, and every open attempt. Whatever else was published, was
ended, or was never announced is retired once nothing has been written there for the time of `grace`.

Times of generations are their manifests' `sealed_at`, relative to the newest of them; ages of objects are the store's
own. Neither is compared with the clock of the machine that decides (I12).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from cachefs.errors import CorruptError
from cachefs.formats.manifest import Manifest
from cachefs.restore.reader import Entry, Seen

HOUR, DAY = 3600, 86400
Version = tuple[str, str]
"""Key and version id of an object."""


class Policy(msgspec.Struct, frozen=True):
    """How much stays: the last `keep_last` generations, the newest of each hour for `keep_hourly` hours and of each day
    for `keep_daily` days. `grace` in seconds: so long must an attempt have been left alone before it is retired.
    """

    keep_last: int = 3
    keep_hourly: int = 24
    keep_daily: int = 7
    grace: float = 86400.0


class Stored(msgspec.Struct, frozen=True):
    """What lies under the prefix of an attempt. `newest` is the store's time of the last write, seconds since the
    epoch; `opened`: its open record is there.
    """

    objects: int
    bytes: int
    newest: float
    opened: bool


class View(msgspec.Struct, frozen=True):
    """One run as it was when `seen` was its pointer.

    `history` is newest first. `listed` are all attempts that the readable versions of the pointer speak of;
    `complete` says that those reach back to the first. `manifests` are those of every generation in the history that is
    not retired, `reused` what the manifests of open attempts pin. `now` is the store's clock.
    """

    seen: Seen
    history: tuple[Entry, ...]
    complete: bool
    listed: frozenset[str]
    manifests: Mapping[str, Manifest]
    reused: frozenset[Version]
    stored: Mapping[str, Stored]
    leased: frozenset[str]
    now: float


class Kept(msgspec.Struct, frozen=True):
    """An attempt that stays, and why. `step` is None for an open one."""

    attempt: str
    generation: str
    step: int | None
    bytes: int
    reasons: tuple[str, ...]


class Candidate(msgspec.Struct, frozen=True):
    """An attempt that nothing keeps. `generation` is empty when it was never published."""

    attempt: str
    generation: str
    objects: int
    bytes: int


class Plan(msgspec.Struct, frozen=True):
    """What to do. `young` would be retired, were it not for the grace; `unknown` may have been published before the
    history begins; neither is touched. `named` is what the manifests pin that stay: it is never deleted.
    """

    kept: tuple[Kept, ...]
    retire: tuple[Candidate, ...]
    young: tuple[Candidate, ...]
    unknown: tuple[Candidate, ...]
    named: frozenset[Version]


def decide(view: View, policy: Policy) -> Plan:
    """Return what stays and what goes. Raises CorruptError for a manifest without a time."""
    pointer = view.seen.pointer
    entries = _generations(view.history)
    names = {entry.published.attempt: entry.published.generation for entry in view.history}
    kept = _kept(view, policy, entries)
    spared = {one.attempt for one in kept} | set(pointer.retired)
    retire, young, unknown = [], [], []
    for attempt, stored in sorted(view.stored.items()):
        if attempt in spared or not (stored.opened or attempt in view.listed):
            continue  # what has neither an open record nor a place in the history is not ours
        candidate = Candidate(attempt, names.get(attempt, ""), stored.objects, stored.bytes)
        if not view.complete and attempt not in view.listed:
            unknown.append(candidate)
        elif view.now - stored.newest < policy.grace:
            young.append(candidate)
        else:
            retire.append(candidate)
    gone = {one.attempt for one in retire}
    named = {pin for attempt, manifest in view.manifests.items() if attempt not in gone for pin in pins(manifest)}
    return Plan(tuple(kept), tuple(retire), tuple(young), tuple(unknown), frozenset(named | view.reused))


def pins(manifest: Manifest) -> Iterable[Version]:
    """Iterate over the object versions that a manifest pins, of whichever attempt they are."""
    for pin in [shard.pin for shard in manifest.shards] + [report.pin for report in manifest.members]:
        yield pin.key, pin.version_id


def sealed_at(manifest: Manifest) -> float:
    """Return when a manifest was sealed, seconds since the epoch. Raises CorruptError when it does not say."""
    try:
        return datetime.strptime(manifest.sealed_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise CorruptError(
            f"manifest of {manifest.generation} (attempt {manifest.attempt}): no time: {manifest.sealed_at!r}"
        ) from error


def _generations(history: Iterable[Entry]) -> list[Entry]:
    """Return each published attempt once, newest first, without retired ones."""
    found: dict[str, Entry] = {}
    for entry in history:
        if not entry.retired:
            found.setdefault(entry.published.attempt, entry)
    return list(found.values())


def _kept(view: View, policy: Policy, entries: list[Entry]) -> list[Kept]:
    reasons: dict[str, list[str]] = {}

    def keep(reason: str, attempts: Iterable[str]) -> None:
        for attempt in attempts:
            reasons.setdefault(attempt, []).append(reason)

    attempts = [entry.published.attempt for entry in entries]
    keep("published", attempts[:1])
    keep("published before", attempts[1:2])
    keep(f"one of the last {policy.keep_last}", attempts[: policy.keep_last])
    times = {attempt: sealed_at(view.manifests[attempt]) for attempt in attempts}
    # A node with a clock that is ahead must not make all others look old: no save is newer than the store's now.
    newest = min(max(times.values(), default=0.0), view.now)
    keep("newest of its hour", _newest_of_each(attempts, times, newest, HOUR, policy.keep_hourly))
    keep("newest of its day", _newest_of_each(attempts, times, newest, DAY, policy.keep_daily))
    keep("being read", view.leased)
    opened = {entry.attempt: entry.generation for entry in view.seen.pointer.open}
    keep("open", opened)
    published = {entry.published.attempt: entry.published for entry in entries}
    kept = []
    for attempt in [*attempts, *sorted(reasons.keys() - set(attempts))]:
        if attempt in reasons:
            one, stored = published.get(attempt), view.stored.get(attempt)
            generation = one.generation if one else opened.get(attempt, "")
            step = one.order.step if one else None
            kept.append(Kept(attempt, generation, step, stored.bytes if stored else 0, tuple(reasons[attempt])))
    return kept


def _newest_of_each(
    attempts: list[str], times: Mapping[str, float], newest: float, seconds: int, count: int
) -> list[str]:
    """Return the attempts (newest first) that are the newest of their hour or day, of the last `count` of those."""
    found: dict[int, str] = {}
    for attempt in attempts:
        at = min(times[attempt], newest)
        slot = int(at // seconds)
        if newest - at < count * seconds and (slot not in found or at > min(times[found[slot]], newest)):
            found[slot] = attempt
    return list(found.values())
