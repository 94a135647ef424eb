"""keys.py: the layout of the bucket. No two things share a key, and no run hides in another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachefs.errors import InvalidError
from cachefs.formats.keys import KEY_MAX, Keys
from cachefs.formats.names import to_bytes, to_text
from tests.test_formats_names import NAMES

KEYS = Keys(prefix="team/ckpt")
ATTEMPT, SHARD = "a" * 32, "b" * 32
OURS = st.sampled_from(
    [b"attempts", b"loose", b"pointer.json", b".", b"..", b"%61ttempts", b"%2E", b"runs", b"shards", b"manifest.json",
     b"Attempts", b"a", b"%", b"%41", b"A"]
)  # fmt: skip
# Few names, many of them ours, so that collisions have every chance to happen.
PATHS = st.lists(OURS | NAMES, min_size=1, max_size=3).map(lambda parts: to_text(b"/".join(parts)))


def layout(keys: Keys) -> list[str]:
    run, one = "llama/größe %25", {"opened": 3, "sealed": 3}
    later = {"opened": 3, "sealed": 5}
    return [
        keys.runs(),
        keys.run(run),
        keys.pointer(run),
        keys.attempts(run),
        keys.attempt(run, ATTEMPT),
        keys.open(run, ATTEMPT),
        keys.close(run, ATTEMPT),
        keys.member(run, ATTEMPT, "node-0.rack 1"),
        keys.manifest(run, ATTEMPT, **one),
        keys.manifest(run, ATTEMPT, **later),
        keys.test(run, ATTEMPT, **one),
        keys.test(run, ATTEMPT, **later),
        keys.shard(run, ATTEMPT, "node-0", SHARD, "tensors/caf%E9.bin"),
        keys.shard(run, ATTEMPT, "node-0", SHARD, "n" * 200),
        keys.loose(run, "logs/events.out#1"),
        keys.loose("attempts/loose", "pointer.json"),
        keys.probe("id"),
    ]


@pytest.mark.parametrize("prefix", ["", "team/ckpt"])
def test_golden_layout(prefix):
    expected = (Path(__file__).parent / "golden" / "keys.txt").read_text().split()
    assert layout(Keys(prefix=prefix)) == [f"{prefix}/{key}".lstrip("/") for key in expected]


@given(PATHS, PATHS, PATHS, PATHS)
@example("a", "attempts/x", "a/attempts", "x")
@example("a/loose", "x", "a", "loose/x")
@example("%2561ttempts", "x", "attempts", "x")
def test_two_different_files_never_share_a_key(run, path, other_run, other_path):
    same = (to_bytes(run), to_bytes(path)) == (to_bytes(other_run), to_bytes(other_path))
    assert (KEYS.loose(run, path) == KEYS.loose(other_run, other_path)) == same


@given(PATHS)
def test_run_of_inverts_run(run):
    for form in (KEYS.run(run), KEYS.run(run) + "/"):
        assert to_bytes(KEYS.run_of(form)) == to_bytes(run)
    assert to_bytes(Keys().run_of(Keys().run(run))) == to_bytes(run)


@given(PATHS, PATHS)
@example("a", "a/attempts")
@example("a", "a/attempts/" + ATTEMPT)
@example("a", "a/pointer.json")
@example("a", "a/loose/b")
@example("a", "a/..")
def test_no_run_hides_in_another(run, other):
    """Whatever lies under one run's own names belongs to that run: no key of another run is there."""
    if to_bytes(run) == to_bytes(other):
        return
    own = (KEYS.attempts(run), f"{KEYS.run(run)}/loose/", KEYS.pointer(run))
    foreign = (KEYS.pointer(other), KEYS.open(other, ATTEMPT), KEYS.loose(other, "x"), KEYS.attempts(other))
    assert not [key for key in foreign if key.startswith(own)]


@given(PATHS, PATHS)
def test_keys_hold_only_characters_that_every_store_and_url_takes(run, path):
    for key in (KEYS.loose(run, path), KEYS.shard(run, ATTEMPT, "node", SHARD, path)):
        assert re.fullmatch(r"[A-Za-z0-9\-._=+,@~%/]+", key)
        assert not {"", ".", ".."} & set(key.split("/"))


@given(PATHS, PATHS)
def test_a_shards_key_is_told_apart_by_its_id_alone(one, other):
    assert KEYS.shard("r", ATTEMPT, "m", "1" * 32, one) != KEYS.shard("r", ATTEMPT, "m", "2" * 32, other)


def test_members_never_share_a_key():
    members = ["a", "A", "a.json", "a/b", "a%2Fb", ".", "..", "é"]
    assert len({KEYS.member("r", ATTEMPT, member) for member in members}) == len(members)


def test_a_key_is_refused_when_it_is_longer_than_s3_takes():
    room = KEY_MAX - len("runs//pointer.json")
    assert len(Keys().pointer("r" * room)) == KEY_MAX
    for refused in (
        lambda: Keys().pointer("r" * (room + 1)),
        lambda: Keys().open("r" * room, ATTEMPT),
        lambda: Keys().manifest("r" * room, ATTEMPT, opened=1, sealed=1),
        lambda: Keys().member("r", ATTEMPT, "m" * KEY_MAX),
        lambda: Keys().shard("r" * room, ATTEMPT, "m", SHARD, "f"),
        lambda: Keys().loose("r", "p" * KEY_MAX),
    ):
        with pytest.raises(InvalidError, match="longer than 1024 bytes"):
            refused()
