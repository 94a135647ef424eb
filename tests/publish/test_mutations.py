"""The rules are broken on purpose, one at a time, and a check that the other tests rely on must notice.

    invariant  mistake                                                        noticed by
    I2         objects are created without a condition                        test_every_write_is_conditional_...
    I2         the pointer is written without a condition                     every schedule (I6)
    I5         nothing is read back                                           test_the_restore_test_refuses_damage
    I5         a sealed attempt is promoted at once                           test_the_restore_test_refuses_damage
    I5         the current versions are tested, not the pinned ones           damage_below_an_intact_version
    I6, I13    no order; no walk; no look back; a second first pointer        test_two_owners: the_checks_find_mistakes
    I7         ownership is not looked at when it counts                      test_two_owners: the_checks_find_mistakes
    I7         the ETag is of a later read than the one that was checked      every schedule (grant, I7)
    I8         the nonce is always the same                                   every schedule (told published)
    I8         bodies may come back: they have no nonce, seq and prev         every schedule (I6)
    I10        an unclear answer is taken for success                         every schedule (told published)
    I10        a 412 is taken for an earlier copy of ours                     every schedule (told published)
    I10        undecided is lost; lost is landed                              test_two_owners: the_checks_find_mistakes
    I10        a 412 for our own object is taken for somebody else's          test_412_over_our_own_write_is_success
    I10        a 412 for somebody else's object is taken for our own          test_other_bytes_under_our_key_...

"Every schedule" is the explorer of owners.py with all its checks; what it says then is in brackets. The small objects
of an attempt survive the first mistake of the last two: they are read and compared after a 412, whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from cachefs.errors import ConditionFailed, CorruptError
from cachefs.formats.codec import encode
from cachefs.formats.pointer import Pointer
from cachefs.formats.records import State
from cachefs.publish import restoretest, rules, writes
from cachefs.publish.rules import Cas, Step
from cachefs.publish.writes import Swap, Writes
from cachefs.store import createonly
from cachefs.store.createonly import Found
from tests.conftest import DeclaredWarnings
from tests.flush import test_createonly
from tests.publish import test_publication
from tests.publish.owners import world
from tests.publish.schedules import explore
from tests.publish.stage import Member

Members = Callable[..., Member]
Patch = pytest.MonkeyPatch
_next = rules._next
_next_step = rules.next_step
_swap = Writes.swap
_classify = createonly.classify
_verify_shard = restoretest.verify_shard


# I2


def no_condition_on_creates(patch: Patch) -> None:
    patch.setattr(createonly, "CREATE_ONLY", None)


def no_condition_on_swaps(patch: Patch) -> None:
    patch.setattr(writes, "Condition", lambda if_match: None)


# I5


def nothing_is_read_back(patch: Patch) -> None:
    patch.setattr(restoretest, "verify_shard", lambda *args, **kwargs: None)


def promoted_untested(patch: Patch) -> None:
    def hasty(*args: Any, **kwargs: Any) -> Step:
        step = _next_step(*args, **kwargs)
        return Step.PROMOTE if step is Step.TEST else step

    patch.setattr(rules, "next_step", hasty)


def current_versions_are_tested(patch: Patch) -> None:
    def verify(store: Any, shard: Any, *args: Any, **kwargs: Any) -> Any:
        current = store.head(shard.pin.key)
        pin = msgspec.structs.replace(shard.pin, version_id=current.version_id)
        return _verify_shard(store, msgspec.structs.replace(shard, pin=pin), *args, **kwargs)

    patch.setattr(restoretest, "verify_shard", verify)


async def damage_below_an_intact_version(members: Members) -> None:
    """The pinned version is damaged, and the same file was written again over it, intact: not to be published."""
    member = members()
    attempt = member.save("step-1", 1)

    def hurt() -> bool:
        if member.attempt(attempt).state is State.SEALED:
            key = member.shards(attempt)[0].key
            found = member.inner.get(key)
            assert found is not None
            test_publication._flip(member.inner, key, b"?" + found[1][1:])
            member.inner.put(key, found[1], condition=None)
        return member.idle()

    await member.publish(until=hurt)
    assert member.attempt(attempt).state is State.ABANDONED
    assert member.generations() == []


# I7


def etag_of_a_later_read(patch: Patch) -> None:
    async def swap(self: Writes, run: str, ours: Pointer) -> Swap:
        seen = await self.pointer(run)
        assert seen is not None
        return await _swap(self, run, msgspec.structs.replace(ours, prev=seen.prev, seq=seen.pointer.seq + 1))

    patch.setattr(Writes, "swap", swap)


# I8


def one_nonce(patch: Patch) -> None:
    def following(current: Any, kind: Any, _nonce: str, at: str, **changes: Any) -> Pointer:
        return _next(current, kind, "the same", at, **changes)

    patch.setattr(rules, "_next", following)


def bodies_may_come_back(patch: Patch) -> None:
    patch.setattr(writes, "encode", lambda ours: encode(msgspec.structs.replace(ours, nonce="", seq=0, prev=None)))


# I10


def unclear_is_success(patch: Patch) -> None:
    async def swap(self: Writes, run: str, ours: Pointer) -> Swap:
        try:
            await self.hop(self.store.put, self.keys.pointer(run), encode(ours), condition=_condition(ours))
        except writes.UNCLEAR:
            pass
        seen = await self.pointer(run)
        assert seen is not None
        return Swap(Cas.LANDED, seen)

    patch.setattr(Writes, "swap", swap)


def refused_is_success(patch: Patch) -> None:
    async def swap(self: Writes, run: str, ours: Pointer) -> Swap:
        try:
            await self.hop(self.store.put, self.keys.pointer(run), encode(ours), condition=_condition(ours))
        except ConditionFailed:
            seen = await self.pointer(run)
            assert seen is not None
            return Swap(Cas.LANDED, seen)
        except writes.UNCLEAR:
            pass
        return await _swap(self, run, ours)

    patch.setattr(Writes, "swap", swap)


def _condition(ours: Pointer) -> Any:
    return writes.Condition(if_match=ours.prev.etag) if ours.prev else writes.CREATE_ONLY


def taken_for(wrong: Found, right: Found) -> Callable[[Patch], None]:
    def mistake(patch: Patch) -> None:
        patch.setattr(createonly, "classify", lambda *given: wrong if (found := _classify(*given)) is right else found)

    return mistake


BY_SCHEDULE: list[tuple[Callable[[Patch], None], str, dict[str, Any]]] = [
    (no_condition_on_swaps, "I6", {}),
    (etag_of_a_later_read, "I7|a grant publishes nothing", {}),
    (one_nonce, "told published", {}),
    (bodies_may_come_back, "I6", {}),
    (unclear_is_success, "told", {"faults": 1}),
    (refused_is_success, "told", {}),
]


@pytest.mark.parametrize(("mistake", "found", "given"), BY_SCHEDULE, ids=lambda value: getattr(value, "__name__", ""))
def test_some_schedule_finds_it(
    monkeypatch: Patch, mistake: Callable[[Patch], None], found: str, given: dict[str, Any]
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        explore(world(existing=True, **given))


Check = Callable[[Members, DeclaredWarnings], Awaitable[None]]


async def every_write(members: Members, _declared: DeclaredWarnings) -> None:
    await test_publication.test_every_write_is_conditional_and_nothing_is_deleted(members)


async def damage(members: Members, declared: DeclaredWarnings) -> None:
    await test_publication.test_the_restore_test_refuses_damage(members, declared, "flipped", ranges=True)


async def damaged_pin(members: Members, declared: DeclaredWarnings) -> None:
    declared("generation abandoned")
    await damage_below_an_intact_version(members)


async def lost_answer(_members: Members, _declared: DeclaredWarnings) -> None:
    await test_createonly.test_412_over_our_own_write_is_success()


async def other_bytes(members: Members, declared: DeclaredWarnings) -> None:
    await test_publication.test_other_bytes_under_our_key_kill_the_attempt(members, declared)


BY_PUBLICATION: list[tuple[Callable[[Patch], None], Check]] = [
    (no_condition_on_creates, every_write),
    (nothing_is_read_back, damage),
    (promoted_untested, damage),
    (current_versions_are_tested, damaged_pin),
    (taken_for(Found.OTHER, Found.OURS), lost_answer),
    (taken_for(Found.OURS, Found.OTHER), other_bytes),
]


@pytest.mark.parametrize("check", [every_write, damage, damaged_pin, lost_answer, other_bytes])
async def test_nothing_is_found_where_nothing_is_broken(
    members: Members, declared_warnings: DeclaredWarnings, check: Check
) -> None:
    await check(members, declared_warnings)


@pytest.mark.parametrize(
    ("mistake", "check"),
    BY_PUBLICATION,
    ids=[
        "no condition",
        "nothing is read back",
        "promoted untested",
        "current versions are tested",
        "ours is another's",
        "another's is ours",
    ],
)
async def test_some_publication_finds_it(
    members: Members,
    monkeypatch: Patch,
    declared_warnings: DeclaredWarnings,
    mistake: Callable[[Patch], None],
    check: Check,
) -> None:
    mistake(monkeypatch)

    def declared(pattern: str, *, optional: bool = False) -> None:
        declared_warnings(pattern, optional=True)

    declared("generation abandoned")
    with pytest.raises((AssertionError, CorruptError)):
        await check(members, declared)  # type: ignore[arg-type]
