"""Which save belongs to which attempt: decided without a clock, and refused where it cannot be told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.formats.manifest import Close, Manifest, Order, Pin, ReportPin, Shard
from cachefs.formats.records import AttemptRecord, SharedRecord, State
from cachefs.members import Members
from cachefs.publish import joining
from cachefs.publish.joining import Absent, Join, Refuse, again, decide, shares, superseded, unwanted

US = Members("b", ("a", "b"), 2, owner=False)
CLOSE = Close("r", "g", "o", "a", "auto", "marker", "A", "")


def offer(attempt: str, **fields: Any) -> SharedRecord:
    base = SharedRecord(attempt, "r", "g", "directory", 1, 1, 1, ("a", "b"), 2, 5)
    return msgspec.structs.replace(base, **fields)


def save(serial: int, state: State = State.OPEN, **fields: Any) -> AttemptRecord:
    base = AttemptRecord(f"s{serial}", "r/g", "r", "g", "directory", "auto", 1, 0.0, serial, state)
    return msgspec.structs.replace(base, **fields)


def decided(offers: list[SharedRecord], saves: list[AttemptRecord], *, started: int = 0) -> Any:
    return decide(offers, saves, us=US, started=started)


def test_one_save_and_one_attempt() -> None:
    assert decided([offer("o")], [save(1)]) == [Join("o", "s1")]
    assert decided([offer("o", close=CLOSE)], [save(1, State.STAGED)]) == [Join("o", "s1")]


def test_nothing_is_decided_before_there_is_a_save_or_a_close() -> None:
    assert decided([offer("o")], []) == []
    assert decided([offer("o", close=CLOSE)], []) == [Absent("o")]


def test_a_save_that_was_abandoned_without_an_attempt_may_be_any_attempts_part() -> None:
    """The attempt may be opened long after the save began, and after the next save of the name."""
    torn = save(4, State.ABANDONED, error="torn")
    for saves in ([torn], [torn, save(5)]):
        (only,) = decided([offer("o")], saves)
        assert isinstance(only, Refuse)
        assert "abandoned (torn)" in only.reason
    second = offer("o", again=True)
    assert decided([second], [torn, save(5)], started=4) == [Join("o", "s5")], "the training has started again"
    (only,) = decided([offer("o", close=CLOSE)], [torn], started=4)
    assert isinstance(only, Refuse), "but it had a part in some save of the name"


def test_only_the_part_of_another_attempt_is_known() -> None:
    over = {"opened_epoch": 1, "ordinal": 0, "closed_at": 1.0}
    assert decided([offer("o")], [save(1, State.ABANDONED, **over), save(2)]) == [Join("o", "s2")]
    for doubt in ({"rewritten": True}, {"opened_epoch": None}):
        (only,) = decided([offer("o")], [save(1, State.ABANDONED, **over | doubt), save(2)])
        assert isinstance(only, Refuse), doubt


def test_after_a_save_that_was_cut_short_no_attempt_is_joined_of_a_member_that_had_no_part_of_it() -> None:
    """That one may begin with it only now; not when the training has dropped it."""
    short = save(1, State.ABANDONED, opened_epoch=1, ordinal=0)
    assert decided([offer("o")], [short, save(2)]) == [Refuse("o", joining.CUT_SHORT, ("s2",))]
    assert decided([offer("o", resumed=True)], [short, save(2)]) == [Join("o", "s2")]
    assert decided([offer("o", wish="s2", resumed=True)], [short, save(2)]) == [Join("o", "s2")]
    assert decided([offer("o", resumed=True)], [save(2)]) == [Join("o", "s2")]
    for known in ({"cancelled": True}, {"closed_at": 1.0}):
        assert decided([offer("o")], [msgspec.structs.replace(short, **known), save(2)]) == [Join("o", "s2")]


@pytest.mark.parametrize(
    ("saves", "offers", "ended", "said"),
    [
        ([], [], (), False),
        ([save(1, State.ABANDONED, opened_epoch=1)], [], (), True),
        ([save(1, State.PUBLISHED, opened_epoch=1)], [], (), False),
        ([], [], ("g",), True),
        ([], [offer("o", before=True)], (), True),
        ([], [offer("o", before=True, local="s1")], (), False),
        ([], [offer("o", before=True, generation="h")], ("h",), False),
        ([], [offer("o")], (), False),
    ],
)
def test_what_a_member_says_of_the_save_before_when_it_asks_for_an_attempt(
    saves: list[AttemptRecord], offers: list[SharedRecord], ended: tuple[str, ...], said: bool
) -> None:
    """On a machine that was replaced, whether or not it has heard of the end of what is older."""
    assert joining.follows(save(2), [*saves, save(2)], offers, ended) is said


def test_a_save_that_waited_when_the_attempt_was_found_is_a_candidate() -> None:
    """Also when the training has started again since, and writes the name a second time."""
    (only,) = decided([offer("o", waiting=("s1",))], [save(1, State.ABANDONED), save(2)], started=1)
    assert isinstance(only, Refuse)


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_members_join_what_all_of_them_wrote_for_the_first_time_or_all_again(theirs: bool, ours: bool) -> None:
    """A save that found no attempt before this one: the attempt may be for either, unless the others say the same."""
    earlier = save(1, State.ABANDONED, **({} if ours else {"opened_epoch": 1, "ordinal": 0, "closed_at": 1.0}))
    (only,) = decided([offer("o", again=theirs)], [earlier, save(2)], started=1)
    if theirs == ours:
        assert only == Join("o", "s2")
    else:
        assert isinstance(only, Refuse)
        assert only.locals == ("s2",)


def test_members_that_disagreed_once_agree_again() -> None:
    refused = save(2, State.ABANDONED, shared="o")
    assert again(save(3), [save(1, State.ABANDONED), refused, save(3)]) is False
    assert again(save(2), [save(1, State.ABANDONED), save(2)]) is True
    assert again(save(1), [save(1), save(2)]) is False


def test_what_the_training_has_written_again_is_over() -> None:
    """Only a save from before the daemon started: one training may write a name twice."""
    old, new = save(1, State.STAGED), save(2)
    assert superseded([old, new], [], 1) == {"s1"}
    assert superseded([old, new], [], 0) == superseded([old], [offer("o")], 1) == set()
    assert superseded([save(1, opened_epoch=1), new], [], 1) == set(), "it has an attempt"
    assert superseded([old], [offer("o", again=True)], 1) == {"s1"}, "another member has begun the next one"
    assert superseded([old, save(2, opened_epoch=1)], [], 0) == {"s1"}, "a later one was opened: never in its turn"
    one = {"kind": "file"}
    assert superseded([save(1, **one), save(2, **one)], [], 1) == set()


def test_joins_keep_the_order_of_the_saves() -> None:
    older, newer = save(1), save(2, State.PUBLISHED, opened_epoch=1, ordinal=1, closed_at=1.0)
    (only,) = decided([offer("o", ordinal=2)], [older, newer])
    assert isinstance(only, Refuse)
    assert "different orders" in only.reason
    assert decided([offer("o", ordinal=2)], [newer, save(3)]) == [Join("o", "s3")]


@pytest.mark.parametrize(
    ("offers", "saves"),
    [
        (["o"], [save(1), save(2)]),
        (["o", "p"], [save(1)]),
        (["o", "p"], [save(1, State.STAGED), save(2)]),
    ],
)
def test_two_of_a_name_between_two_looks_cannot_be_told_apart(offers: list[str], saves: list[AttemptRecord]) -> None:
    found = decided([offer(name) for name in offers], saves)
    assert [one.shared for one in found if isinstance(one, Refuse)] == offers
    waiting = {one.attempt for one in saves if not one.state.final}
    assert all(set(one.locals) == waiting for one in found), "nor can they belong to a later one"


def test_an_attempt_that_was_closed_before_this_daemon_was_there() -> None:
    """What its predecessor wrote, it cannot know; a save that it finds in its journal was there."""
    late = offer("o", close=CLOSE, late=True)
    assert isinstance(decided([late], [])[0], Refuse)
    assert isinstance(decided([late], [save(8)], started=7)[0], Refuse)
    assert decided([late], [save(7)], started=7) == [Join("o", "s7")]


def test_an_attempt_that_was_opened_for_a_save() -> None:
    """The wish tells which save is meant; but others may have no other part than the next one."""
    assert decided([offer("o", wish="s1")], [save(1)]) == [Join("o", "s1")]
    assert isinstance(decided([offer("o", wish="s1")], [save(1, State.ABANDONED)])[0], Refuse)
    both = decided([offer("o", wish="s1"), offer("p")], [save(1), save(2)])
    assert [(one.shared, one.locals) for one in both] == [("o", ("s1", "s2")), ("p", ("s1", "s2"))]


def test_a_member_whose_save_has_another_attempt_does_not_claim_to_have_none() -> None:
    busy = save(1, State.FLUSHED, shared="other", opened_epoch=1)
    (only,) = decided([offer("o", close=CLOSE)], [busy])
    assert only == Refuse("o", "the save of this member belongs to another attempt")
    assert decided([offer("o")], [busy]) == []


def test_attempts_of_other_members_are_none_of_its_business_before_it_has_a_save_of_that_name() -> None:
    others = offer("o", members=("a", "c"))
    assert decided([others], []) == decided([others], [save(1, State.PUBLISHED, opened_epoch=1)]) == []
    wished = offer("o", members=("a", "c"), wish="s1")
    assert isinstance(decided([wished], [save(1, State.ABANDONED)])[0], Refuse), "nobody else will answer"
    (only,) = decided([others], [save(1)])
    assert only == Refuse("o", "b is configured for 2 members: a, b, and the owner of the attempt for 2 members: a, c")
    (mine,) = decided([wished], [save(1)])
    assert isinstance(mine, Refuse)
    assert mine.locals == ("s1",), "opened for this save, and not for this member"


@pytest.mark.parametrize("theirs", [{"members": (), "count": 2}, {"members": ("a", "b", "c"), "count": 3}])
def test_a_member_that_is_configured_otherwise_than_the_owner_refuses(theirs: dict[str, Any]) -> None:
    (only,) = decided([offer("o", **theirs)], [])
    assert isinstance(only, Refuse)
    assert "b is configured for 2 members: a, b, and the owner" in only.reason


def test_a_service_has_no_part_in_anything() -> None:
    service = Members("p", (), 2, owner=True, service=True)
    assert decide([offer("o", members=(), close=CLOSE)], [], us=service, started=0) == []


def test_a_generation_of_one_file_is_one_members() -> None:
    theirs = offer("o", kind="file", members=("a",))
    assert "is the file of member a" in unwanted([theirs], save(1, kind="file"), "b")
    assert unwanted([theirs], save(1, kind="file"), "a") == ""
    assert unwanted([offer("o")], save(1), "b") == ""


states = st.sampled_from([State.OPEN, State.STAGED, State.ABANDONED, State.PUBLISHED])
saves = st.lists(st.tuples(states, st.booleans()), max_size=4).map(
    lambda found: [
        save(serial, state, **({"shared": f"x{serial}", "opened_epoch": 1} if joined else {}))
        for serial, (state, joined) in enumerate(found, 1)
    ]
)
offers = st.lists(
    st.builds(
        lambda closed, late, wish: {"close": CLOSE if closed or late else None, "late": late, "wish": wish},
        st.booleans(),
        st.booleans(),
        st.sampled_from(["", "s1", "s2", "elsewhere"]),
    ),
    max_size=3,
).map(lambda found: [offer(f"o{number}", **fields) for number, fields in enumerate(found)])


@given(offers, saves, st.integers(0, 4))
def test_what_holds_for_every_decision(found: list[SharedRecord], mine: list[AttemptRecord], started: int) -> None:
    decisions = decided(found, mine, started=started)
    shared = [one.shared for one in decisions]
    assert len(set(shared)) == len(shared), "one decision for an attempt"
    joined = [one.local for one in decisions if isinstance(one, Join)]
    assert len(set(joined)) == len(joined), "a save belongs to one attempt"
    by_id, offered = {one.attempt: one for one in mine}, {one.attempt: one for one in found}
    for one in decisions:
        if isinstance(one, Join):
            assert by_id[one.local].opened_epoch is None
            assert not by_id[one.local].state.final
        elif isinstance(one, Absent):
            assert offered[one.shared].close is not None
            assert all(part.state.final for part in mine), "a member with a save does not say that it has none"
    guessed = [one for one in decisions if isinstance(one, Join) and offered[one.shared].wish != one.local]
    assert len(guessed) <= 1, "more than one without a wish would be a guess"


def shard(path: str, member: str, size: int) -> Shard:
    return Shard((path,), member, Pin(path, "v", size, "d"), 8, ("d",), 0o600, 0)


sizes = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 1000)), max_size=12)


@given(sizes, st.integers(1, 3))
def test_members_read_what_others_wrote(given_sizes: list[tuple[str, int]], count: int) -> None:
    members = ["a", "b", "c"][:count]
    found = [shard(str(n), writer, size) for n, (writer, size) in enumerate(given_sizes) if writer in members]
    manifest = Manifest(
        "r", "g", "t", "directory", Order(1, 1, 1), 1, "a", "auto",
        tuple(ReportPin(name, Pin("k", "v", 1, "d")) for name in members), tuple(found), (), (), (), "",
    )  # fmt: skip
    parts = shares(manifest)
    assert sorted(parts) == members
    assert sorted(one.paths for part in parts.values() for one in part) == sorted(one.paths for one in found)
    if count > 1:
        assert all(one.member != tester for tester, part in parts.items() for one in part)
    loads = [sum(max(one.pin.size, 1) for one in part) for part in parts.values()]
    if count > 2 and len({one.member for one in found}) == 1:
        readers = [load for name, load in zip(parts, loads, strict=True) if name != found[0].member]
        assert max(readers) - min(readers) <= max((one.pin.size for one in found), default=0) + 1
