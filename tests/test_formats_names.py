"""names.py: any bytes as text and back, and no way out of a directory."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachefs.errors import CorruptError
from cachefs.formats.names import NAME_MAX, PATH_MAX, checked_path, to_bytes, to_text

NAMES = st.one_of(
    st.binary(min_size=1, max_size=40).map(lambda name: name.replace(b"\0", b"").replace(b"/", b"") or b"x"),
    st.text(min_size=1, max_size=20).map(lambda name: name.encode("utf-8", "surrogatepass").replace(b"\0", b"")),
).map(lambda name: name.replace(b"/", b"_") or b"x")
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(b"/".join)


@given(PATHS)
@example(b"%41")
@example(b"100%")
@example(b"%%2541%")
@example(b"\xed\xa0\x80")  # an encoded surrogate is not UTF-8
@example(b"\xc3")
@example("é".encode())
@example(b"a\nb\x7f\xc2\x85")
def test_text_form_and_back(path):
    text = to_text(path)
    assert to_bytes(text) == path
    assert text.encode().decode() == text
    assert all(char.isprintable() for char in text)


@given(PATHS, PATHS)
def test_two_paths_never_share_a_text_form(one, other):
    assert (to_text(one) == to_text(other)) == (one == other)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (b"model.safetensors", "model.safetensors"),
        (b"a b/c", "a b/c"),
        ("größe".encode(), "größe"),
        (b"caf\xe9", "caf%E9"),
        (b"50%", "50%25"),
        (b"a\tb", "a%09b"),
        ("\u202e".encode(), "%E2%80%AE"),
    ],
)
def test_text_forms_that_people_will_see(path, text):
    assert to_text(path) == text


@given(PATHS.filter(lambda path: not {b".", b".."} & set(path.split(b"/"))))
def test_good_paths_pass(path):
    assert checked_path(to_text(path)) == path


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "/etc/passwd", "a/", "a//b", ".", "..", "../a", "a/..", "a/./b", "a/../../b",
        "%2E%2E/a", "a/%2E", "%2Fetc", "a%2F..%2F..", "%2F", "a%00b", "a\0b", "\ud800",
        "x" * (NAME_MAX + 1), "/".join(["x" * 200] * 21), "é" * 128,
    ],
)  # fmt: skip
def test_every_way_out_is_refused(text):
    with pytest.raises(CorruptError, match="unsafe path"):
        checked_path(text)


def test_the_longest_names_and_paths_pass():
    assert checked_path("x" * NAME_MAX) == b"x" * NAME_MAX
    longest = "/".join(["x" * 255] * 15 + ["y" * 255])
    assert len(checked_path(longest)) == PATH_MAX - 1


@given(st.text(max_size=30))
def test_whatever_text_a_manifest_holds_the_result_stays_inside(text):
    try:
        path = checked_path(text)
    except CorruptError:
        return
    assert not path.startswith(b"/")
    assert b"\0" not in path
    assert not {b"", b".", b".."} & set(path.split(b"/"))
