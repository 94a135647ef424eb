"""Pins: what they keep, what dropping frees, and what a crash between two steps leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from cachefs.staging import pins as pins_module
from cachefs.staging.copying import clone
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins


@pytest.fixture
def staging(tmp_path) -> Iterator[Staging]:
    made = Staging(tmp_path)
    yield made
    made.close()


@pytest.fixture
def pins(staging) -> Pins:
    (staging.tree / "x").write_bytes(b"bytes")
    return Pins(staging)


def pin(pins, staging, attempt="a", shard="s"):
    return pins.add(attempt, shard, staging.tree_fd, b"x")


def test_a_pin_is_known_again_after_a_restart(pins, staging):
    ino = pin(pins, staging).st_ino
    pin(pins, staging, "b")
    again = Pins(staging)
    assert again.holders(ino) == {("a", "s"), ("b", "s")}
    assert again.shards("a") == {"s"}


def test_dropping_a_pin_frees_the_bytes_when_the_name_is_gone_and_may_be_repeated(pins, staging):
    ino = pin(pins, staging).st_ino
    (staging.tree / "x").unlink()
    fd = pins.open("a", "s")
    pins.drop("a", "s")
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    assert pins.holders(ino) == frozenset()
    pins.drop("a", "s")
    pins.drop_attempt("a")
    pins.drop_attempt("a")
    assert os.listdir(staging.pins) == []


def test_links_and_pins_are_counted_at_one_instant(pins, staging):
    """While another thread pins and drops without end, the user's link count is never anything but 1."""
    ended = threading.Event()

    def pin_and_drop():
        while not ended.is_set():
            pin(pins, staging)
            pins.drop("a", "s")

    thread = threading.Thread(target=pin_and_drop)
    thread.start()
    try:
        seen = {stat.st_nlink - count for stat, count in (pins.counted((staging.tree / "x").stat) for _ in range(5000))}
    finally:
        ended.set()
        thread.join()
    assert seen == {1}


def test_releasing_an_inode_moves_its_pins_to_copies_with_the_same_bytes_and_times(pins, staging):
    os.utime(staging.tree / "x", ns=(10**18, 10**18))
    ino = pin(pins, staging).st_ino
    fd = pins.open("a", "s")
    assert pins.is_current("a", "s", fd)
    pins.release_inode(ino)
    assert not pins.is_current("a", "s", fd)
    os.close(fd)
    assert pins.holders(ino) == frozenset()
    copy = pins.path("a", "s").stat()
    assert (copy.st_mtime_ns, pins.path("a", "s").read_bytes()) == (10**18, b"bytes")
    assert pins.holders(copy.st_ino) == {("a", "s")}


@pytest.mark.parametrize("when", ["before the copy", "during the copy"])
def test_a_pin_that_is_dropped_while_its_inode_is_released_stays_dropped(pins, staging, monkeypatch, when):
    """Publication may drop the pins of an attempt at any moment; the writer must not notice."""
    ino = pin(pins, staging).st_ino

    def drop_first(*_):
        pins.drop_attempt("a")
        return original(*_)

    if when == "before the copy":
        original = pins.open
        monkeypatch.setattr(pins, "open", drop_first)
    else:
        original = clone
        monkeypatch.setattr(pins_module, "clone", drop_first)
    pins.release_inode(ino)
    assert os.listdir(staging.pins) == os.listdir(staging.scratch) == []
    assert pins.holders(ino) == frozenset()


def test_a_copy_that_does_not_fit_leaves_the_pin_and_nothing_else(pins, staging, monkeypatch):
    ino = pin(pins, staging).st_ino

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr("fcntl.ioctl", lambda *_: (_ for _ in ()).throw(OSError(95, "no reflinks here")))
    with pytest.raises(OSError, match="No space left"):
        pins.release_inode(ino)
    assert pins.holders(ino) == {("a", "s")}
    assert os.listdir(staging.scratch) == []


def test_the_sweep_drops_attempts_nobody_knows(pins, staging):
    pin(pins, staging, "known")
    pin(pins, staging, "stray")
    assert pins.sweep({"known"}) == ["stray"]
    assert os.listdir(staging.pins) == ["known"]
