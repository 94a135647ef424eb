"""Writers that outlive the mount: found by a lease, followed through renames, told once when they close."""

from __future__ import annotations

import os

import pytest

from cachefs.staging.survivors import Survivors


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tree").mkdir()
    for name in ("written", "read", "left"):
        (tmp_path / "tree" / name).write_bytes(b"x")
    return tmp_path / "tree"


def test_a_writer_is_told_from_a_reader_and_its_close_is_seen_once_under_the_present_name(tree):
    tree_fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    writer, reader = os.open(tree / "written", os.O_WRONLY), os.open(tree / "read", os.O_RDONLY)
    survivors = Survivors(tree_fd)
    assert survivors.find([b"written", b"read", b"left", b"missing"]) == [b"written"]
    assert (survivors.ended(), len(survivors)) == ([], 1)
    os.rename(tree / "written", tree / "moved")
    os.close(writer)
    assert survivors.ended() == [b"moved"]
    assert (survivors.ended(), len(survivors)) == ([], 0)
    survivors.close()
    for fd in (reader, tree_fd):
        os.close(fd)


def test_a_file_that_lost_its_name_is_forgotten_when_it_is_closed(tree):
    tree_fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    writer = os.open(tree / "written", os.O_RDWR)
    survivors = Survivors(tree_fd)
    assert survivors.find([b"written"]) == [b"written"]
    os.unlink(tree / "written")
    assert len(survivors) == 1
    os.close(writer)
    assert (survivors.ended(), len(survivors)) == ([], 0)
    os.close(tree_fd)
