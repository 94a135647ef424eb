"""Restoring: everything as it was, atomically; nothing outside the target, whatever the manifest says."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cachefs.errors import CachefsError, CorruptError, DeniedError, InvalidError, StoreError
from cachefs.formats.manifest import Directory, Manifest, Symlink, Tracker
from cachefs.formats.names import to_text
from cachefs.restore.files import restore
from cachefs.restore.layout import check_manifest
from tests.restore.make import manifest, memory, shard
from tests.store.faults import FaultyStore, Rule, corrupted, lost_request, rules

FILES = {"model.bin": b"0123456789abcdefghij", "sub/deep/x": b"x", "sub/empty": b""}
MTIME = 1_600_000_000_987_654_321


def tree(root: Path) -> dict[str, bytes | str | None]:
    """Return all there is below a directory."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EACCES, DeniedError), (errno.EPERM, DeniedError), (errno.EROFS, DeniedError), (errno.EIO, CachefsError)],
)
def test_where_this_user_may_not_write_is_told_from_a_failing_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[CachefsError]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refused)
    store = memory()
    with pytest.raises(CachefsError, match="cannot restore to") as raised:
        restore(store, manifest(store, FILES), tmp_path / "out")
    assert type(raised.value) is error


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("ranges", [True, False])
def test_everything_comes_back(tmp_path: Path, workers: int, ranges: bool) -> None:
    store = memory()
    made = manifest(
        store,
        FILES,
        symlinks=(Symlink("sub/link", "../model.bin"), Symlink("dangling", "/nowhere")),
        directories=(
            Directory(".", 0o750, MTIME),
            Directory("sub", 0o2770, MTIME + 1),
            Directory("sub/hollow", 0o500, MTIME + 2),
        ),
        trackers=(Tracker("latest", b"step-1\n"), Tracker("newest", b"step-1", symlink=True)),
    )
    linked = msgspec.structs.replace(made.shards[0], paths=("model.bin", "sub/deep/same"))
    made = msgspec.structs.replace(made, shards=(linked, *made.shards[1:]))
    counted: list[int] = []
    result = restore(store, made, tmp_path / "out", workers=workers, ranges=ranges, progress=counted.append)
    root = tmp_path / "out/step-1"
    assert result.path == root
    assert (result.shards, result.bytes, sum(counted)) == (3, 21, 21)
    assert result.trackers == ("latest", "newest")
    assert tree(root) == {
        "dangling": "/nowhere",
        "model.bin": FILES["model.bin"],
        "sub": None,
        "sub/deep": None,
        "sub/deep/same": FILES["model.bin"],
        "sub/deep/x": b"x",
        "sub/empty": b"",
        "sub/hollow": None,
        "sub/link": "../model.bin",
    }
    assert (root / "model.bin").stat().st_ino == (root / "sub/deep/same").stat().st_ino
    status = (root / "model.bin").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, made.shards[0].mtime_ns)
    for path, mode, mtime in ((".", 0o750, MTIME), ("sub", 0o2770, MTIME + 1), ("sub/hollow", 0o500, MTIME + 2)):
        status = (root / path).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (mode, mtime)
    assert (tmp_path / "out/latest").read_bytes() == b"step-1\n"
    assert os.readlink(tmp_path / "out/newest") == "step-1"
    assert sorted(os.listdir(tmp_path / "out")) == ["latest", "newest", "step-1"]


def test_a_generation_of_one_file(tmp_path: Path) -> None:
    store = memory()
    made = manifest(store, {"model.pt": b"weights"}, generation="model.pt", kind="file")
    assert restore(store, made, tmp_path).path == tmp_path / "model.pt"
    assert tree(tmp_path) == {"model.pt": b"weights"}


def test_a_generation_without_files(tmp_path: Path) -> None:
    made = manifest(memory(), {}, directories=(Directory(".", 0o755, MTIME),))
    restore(memory(), made, tmp_path)
    assert tree(tmp_path) == {"step-1": None}


def test_names_of_any_bytes(tmp_path: Path) -> None:
    name = b"caf\xc3\xa9 \xff%41\n"
    store = memory()
    made = manifest(store, {to_text(name): b"data"}, generation=to_text(b"st\xffp"))
    restore(store, made, tmp_path)
    assert os.listdir(os.fsencode(tmp_path / os.fsdecode(b"st\xffp"))) == [name]


def test_user_attributes_come_back_or_are_reported(tmp_path: Path) -> None:
    store = memory()
    made = manifest(store, {})
    made = msgspec.structs.replace(made, shards=(shard(store, "a", b"", xattrs={"user.note": b"\x00\xff"}),))
    result = restore(store, made, tmp_path)
    if result.skipped_xattrs:
        assert result.skipped_xattrs == ("user.note",)
    else:
        assert os.getxattr(tmp_path / "step-1/a", "user.note") == b"\x00\xff"


def test_no_privilege_comes_out_of_a_bucket(tmp_path: Path) -> None:
    store = memory()
    made = manifest(store, {})
    made = msgspec.structs.replace(made, shards=(shard(store, "a", b"", mode=0o6755),))
    restore(store, made, tmp_path)
    assert stat.S_IMODE((tmp_path / "step-1/a").stat().st_mode) == 0o755
    for name in ("security.capability", "trusted.x", "user.\0"):
        bad = msgspec.structs.replace(made, shards=(shard(store, "a", b"", xattrs={name: b"1"}),))
        with pytest.raises(CorruptError, match="not a user's"):
            restore(store, bad, tmp_path / "bad")


def test_an_existing_target_is_refused_or_replaced(tmp_path: Path) -> None:
    store = memory()
    made = manifest(store, {"new": b"new"}, trackers=(Tracker("latest", b"new"),))
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/old").write_bytes(b"old")
    (tmp_path / "latest").symlink_to("/etc/passwd")
    with pytest.raises(InvalidError, match="exists"):
        restore(store, made, tmp_path)
    assert tree(tmp_path)["step-1/old"] == b"old"
    restore(store, made, tmp_path, replace=True)
    assert tree(tmp_path) == {"latest": b"new", "step-1": None, "step-1/new": b"new"}


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_in_the_place_of_a_tracker_is_refused_before_anything_changes(
    tmp_path: Path, replace: bool
) -> None:
    inner = memory()
    made = manifest(inner, FILES, trackers=(Tracker("newest", b"step-1", symlink=True), Tracker("latest", b"new")))
    if replace:
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1/old").write_bytes(b"old")
    (tmp_path / "latest").mkdir()
    before = tree(tmp_path)
    store = FaultyStore(inner)
    with pytest.raises(InvalidError, match="latest is a directory"):
        restore(store, made, tmp_path, replace=replace)
    assert tree(tmp_path) == before
    assert not store.calls, "it is found out before anything is read"


def test_a_directory_that_appears_in_the_place_of_a_tracker_changes_nothing(tmp_path: Path) -> None:
    store = memory()
    made = manifest(store, FILES, trackers=(Tracker("latest", b"new"),))
    with pytest.raises(InvalidError, match="latest is a directory"):
        restore(store, made, tmp_path, progress=lambda _: (tmp_path / "latest").mkdir(exist_ok=True))
    assert tree(tmp_path) == {"latest": None}


@pytest.mark.parametrize("replace", [False, True])
def test_a_tracker_that_may_not_be_replaced_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    """It may be another user's, in a directory with the sticky bit."""
    store = memory()
    made = manifest(store, {"new": b"new"}, trackers=(Tracker("latest", b"new"),))
    (tmp_path / "latest").write_bytes(b"old")
    if replace:
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1/old").write_bytes(b"old")
    before, rename = tree(tmp_path), os.rename

    def refuse(old: Any, new: Any) -> None:
        if os.path.basename(os.fsencode(new)) == b"latest":
            raise PermissionError(errno.EPERM, "sticky", new)
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(DeniedError):
            restore(store, made, tmp_path, replace=replace)
    assert tree(tmp_path) == before
    restore(store, made, tmp_path, replace=replace)
    assert tree(tmp_path) == {"latest": b"new", "step-1": None, "step-1/new": b"new"}


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("refused", [b"latest", b"sync"])
def test_trackers_that_were_replaced_become_what_they_were_when_the_last_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool, refused: bytes
) -> None:
    store = memory()
    names = ("file", "link", "none", "latest")
    made = manifest(store, {"new": b"new"}, trackers=tuple(Tracker(name, b"new") for name in names))
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "latest").write_bytes(b"old")
    if replace:
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1/old").write_bytes(b"old")
    before, rename, renamed = tree(tmp_path), os.rename, []
    number = (tmp_path / "file").stat().st_ino

    def refuse(old: Any, new: Any) -> None:
        name = os.path.basename(os.fsencode(new))
        if name == refused:
            raise PermissionError(errno.EPERM, "sticky", new)
        assert name not in (b"file", b"latest") or os.path.lexists(new), "never without a tracker"
        rename(old, new)
        renamed.append(name)

    def no_sync(_: Path) -> None:
        raise PermissionError(errno.EPERM, "refused")

    monkeypatch.setattr(os, "rename", refuse)
    if refused == b"sync":
        monkeypatch.setattr("cachefs.restore.files._sync_directory", no_sync)
    with pytest.raises(DeniedError):
        restore(store, made, tmp_path, replace=replace)
    assert {b"file", b"link", b"none"} <= set(renamed), "they were replaced before"
    assert tree(tmp_path) == before
    assert (tmp_path / "file").stat().st_ino == number


def test_a_tracker_that_cannot_be_linked_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's (protected_hardlinks), or on a file system without hard links."""
    store = memory()
    made = manifest(store, {"new": b"new"}, trackers=(Tracker("latest", b"new"),))
    (tmp_path / "latest").write_bytes(b"old")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    restore(store, made, tmp_path)
    assert tree(tmp_path) == {"latest": b"new", "step-1": None, "step-1/new": b"new"}


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("fault", [corrupted, lost_request])
@pytest.mark.parametrize("replace", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path: Path, workers: int, fault: Any, replace: bool) -> None:
    inner = memory()
    made = manifest(inner, FILES, directories=(Directory("sub", 0o500, MTIME),), trackers=(Tracker("latest", b"new"),))
    if replace:
        (tmp_path / "step-1").mkdir()
    (tmp_path / "latest").write_bytes(b"old")
    before = tree(tmp_path)
    for nth in (1, 2, 3, 4):
        store = FaultyStore(inner, rules(Rule("get_range", fault, nth=nth)))
        with pytest.raises((CorruptError, StoreError)):
            restore(store, made, tmp_path, replace=replace, workers=workers)
        assert tree(tmp_path) == before


def test_a_full_disk_is_said_before_anything_is_read(tmp_path: Path) -> None:
    store = memory()
    made = manifest(store, {"a": b"12345678"})
    huge = made.shards[0]
    huge = msgspec.structs.replace(huge, pin=msgspec.structs.replace(huge.pin, size=1 << 60), part_size=1 << 60)
    with pytest.raises(CachefsError, match="free"):
        restore(store, msgspec.structs.replace(made, shards=(huge,)), tmp_path)


# hostile manifests


def with_paths(*paths: str) -> Callable[[Manifest], Manifest]:
    def change(made: Manifest) -> Manifest:
        return msgspec.structs.replace(made, shards=(msgspec.structs.replace(made.shards[0], paths=paths),))

    return change


def with_fields(**fields: Any) -> Callable[[Manifest], Manifest]:
    return lambda made: msgspec.structs.replace(made, **fields)


def with_first(path: str, **fields: Any) -> Callable[[Manifest], Manifest]:
    return lambda made: with_fields(**fields)(with_paths(path)(made))


HOSTILE: dict[str, Callable[[Manifest], Manifest]] = {
    "parent": with_paths("../escape"),
    "parent inside": with_paths("a/../../escape"),
    "escaped parent": with_paths("%2E%2E/escape"),
    "absolute": with_paths("/etc/escape"),
    "empty": with_paths(""),
    "no path": with_paths(),
    "dot": with_paths("./a"),
    "double slash": with_paths("a//b"),
    "trailing slash": with_paths("a/"),
    "nul": with_paths("a%00b"),
    "long name": with_paths("n" * 256),
    "surrogate": with_paths("\ud800"),
    "twice": with_paths("a", "a"),
    "twice, encoded": with_paths("a", "%61"),
    "file and directory": with_paths("a", "a/b"),
    "file and directory entry": with_first("a", directories=(Directory("a", 0o755, 0),)),
    "directory twice": with_fields(directories=(Directory("d", 0o755, 0), Directory("d", 0o700, 0))),
    "root twice": with_fields(directories=(Directory(".", 0o755, 0), Directory(".", 0o700, 0))),
    "directory outside": with_fields(directories=(Directory("../d", 0o755, 0),)),
    "through a symlink": with_first("link/escape", symlinks=(Symlink("link", "/tmp"),)),
    "through two symlinks": with_first("l/m/escape", symlinks=(Symlink("l/m", "/tmp"), Symlink("l", ".."))),
    "over a symlink": with_first("link", symlinks=(Symlink("link", "/tmp/escape"),)),
    "symlink outside": with_fields(symlinks=(Symlink("../escape", "x"),)),
    "symlink to nothing": with_fields(symlinks=(Symlink("link", ""),)),
    "symlink with nul": with_fields(symlinks=(Symlink("link", "a%00"),)),
    "directory under a symlink": with_fields(
        symlinks=(Symlink("l", "/tmp"),), directories=(Directory("l/escape", 0o755, 0),)
    ),
    "generation outside": with_fields(generation="../escape"),
    "generation with a slash": with_fields(generation="a/b"),
    "generation dots": with_fields(generation=".."),
    "tracker outside": with_fields(trackers=(Tracker("../escape", b""),)),
    "tracker below": with_fields(trackers=(Tracker("d/escape", b""),)),
    "tracker over the generation": with_fields(trackers=(Tracker("step-1", b""),)),
    "tracker twice": with_fields(trackers=(Tracker("t", b""), Tracker("t", b"1"))),
    "tracker link to nothing": with_fields(trackers=(Tracker("t", b"", symlink=True),)),
    "one file of another name": with_fields(kind="file"),
    "one file, two shards": lambda made: with_fields(kind="file", shards=made.shards * 2)(made),
    "one file and a link": with_first("step-1", kind="file", symlinks=(Symlink("x", "y"),)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_write_nothing(tmp_path: Path, name: str) -> None:
    store = memory()
    made = HOSTILE[name](manifest(store, {"file": b"data"}))
    with pytest.raises(CorruptError):
        check_manifest(made)
    out = tmp_path / "deep/out"
    with pytest.raises(CorruptError):
        restore(store, made, out)
    assert not out.exists() or list(out.iterdir()) == []
    assert not list(tmp_path.rglob("*escape*"))


def test_a_symlink_in_place_of_the_target_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / "step-1").symlink_to(outside)
    store = memory()
    made = manifest(store, {"a": b"data"})
    with pytest.raises(InvalidError, match="exists"):
        restore(store, made, out)
    restore(store, made, out, replace=True)
    assert list(outside.iterdir()) == []
    assert not (out / "step-1").is_symlink()
