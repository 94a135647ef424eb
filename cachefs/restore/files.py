"""A generation as files in a directory: all of it, verified and synced, or nothing.

Everything is written into `DIR/.<generation>.restoring-<id>`, which only this process knows, and renamed into place at
the end. Symbolic links are made last, so no write of a restore ever goes through one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from cachefs import clock
from cachefs.errors import CachefsError, CorruptError, DeniedError, InvalidError
from cachefs.formats.manifest import Manifest, Shard
from cachefs.restore.layout import Layout, check_manifest
from cachefs.restore.pool import run_all
from cachefs.restore.shards import read_shard
from cachefs.restore.verify import Progress, silent
from cachefs.store.base import StoreReads

_FILE_BITS = 0o0777  # no setuid, setgid or sticky bit comes out of a bucket
_DIRECTORY_BITS = 0o3777  # setgid passes a group on, sticky protects shared directories
_TEMP_NAME_MAX = 100


class Restored(msgspec.Struct, frozen=True):
    """What was restored, and where. `skipped_xattrs` could not be set on this file system."""

    path: Path
    shards: int
    bytes: int
    trackers: tuple[str, ...]
    skipped_xattrs: tuple[str, ...]


def restore(
    store: StoreReads,
    manifest: Manifest,
    directory: Path,
    *,
    replace: bool = False,
    workers: int = 8,
    ranges: bool = True,
    progress: Progress = silent,
    new_id: str = "",
) -> Restored:
    """Write a generation to `directory/<generation>` and its trackers beside it; blocks. Created directories, modes,
    times, `user.` xattrs, hard and symbolic links are as they were at the close; everything is synced to disk.

    An existing target is refused (InvalidError), or moved aside and deleted after the new one is in place with
    `replace`; trackers are replaced, and a directory of a tracker's name is refused. On any error nothing is left but
    what was there; only a tracker that cannot be hard linked may be the new one if the system refuses another. Raises
    CorruptError that names the shard, DeniedError where this user may not write, CachefsError for other local failures
    (disk full), and the store's errors.
    """
    layout = check_manifest(manifest)
    target = directory / os.fsdecode(layout.root)
    temp = directory / (f".{os.fsdecode(layout.root[:_TEMP_NAME_MAX])}.restoring-{new_id or clock.new_id()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target) and not replace:
            raise InvalidError(f"{target} exists", hint="restore elsewhere, or give --replace")
        _check_trackers(directory, layout)
        _check_space(directory, manifest)
        temp.mkdir(mode=0o700)
        try:
            writer = _Writer(store, layout, temp / "new", ranges=ranges, progress=progress)
            writer.write(workers)
            trackers = _write_trackers(temp, layout)
            _check_trackers(directory, layout)
            with ExitStack() as undo:  # a tracker may be another user's, in a directory with the sticky bit
                _put_in_place(temp, target, replace)
                undo.callback(_take_back, temp, target)
                for name in trackers:
                    undo.callback(_replace_tracker(trackers[name], os.path.join(os.fsencode(directory), name)))
                _sync_directory(directory)
                undo.pop_all()
        finally:
            remove_tree(temp)
    except OSError as error:
        text = f"cannot restore to {target}: {error.strerror}: {error.filename or directory}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DeniedError(text, hint="restore to a directory that this user may write to") from error
        raise CachefsError(text) from error
    names = tuple(tracker.path for _, tracker in layout.trackers)
    return Restored(target, len(manifest.shards), manifest.size, names, tuple(sorted(writer.skipped)))


class _Writer:
    """Writes a layout below `root`, which is a directory or, for a generation of one file, that file."""

    def __init__(self, store: StoreReads, layout: Layout, root: Path, *, ranges: bool, progress: Progress) -> None:
        self._store = store
        self._layout = layout
        self._root = os.fsencode(root)
        self._ranges = ranges
        self._progress = progress
        self.skipped: set[str] = set()

    def write(self, workers: int) -> None:
        """Write everything and sync it, except the directory that holds `root`."""
        layout = self._layout
        if layout.single:
            self._file([self._root], layout.files[0][1])
            return
        os.mkdir(self._root)
        for path in layout.parents:
            os.mkdir(self._at(path))
        jobs = [partial(self._file, [self._at(path) for path in paths], shard) for paths, shard in layout.files]
        run_all(jobs, workers)
        for path, target in layout.symlinks:
            os.symlink(target, self._at(path))
        self._finish_directories()

    def _at(self, path: bytes) -> bytes:
        return self._root if path == b"." else os.path.join(self._root, path)

    def _file(self, paths: list[bytes], shard: Shard) -> None:
        fd = os.open(paths[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:

            def sink(offset: int, data: bytes) -> None:
                _write_all(fd, data, offset)
                self._progress(len(data))

            read_shard(self._store, shard, sink, ranges=self._ranges)
            self._xattrs(fd, shard)
            os.fchmod(fd, shard.mode & _FILE_BITS)
            os.utime(fd, ns=(shard.mtime_ns, shard.mtime_ns))
            os.fsync(fd)
        finally:
            os.close(fd)
        for path in paths[1:]:
            os.link(paths[0], path, follow_symlinks=False)

    def _xattrs(self, fd: int, shard: Shard) -> None:
        for name, value in shard.xattrs.items():
            if not name.startswith("user.") or "\0" in name:
                raise CorruptError(f"shard {shard.paths[0]}: attribute {name!r} in the manifest is not a user's")
            try:
                os.setxattr(fd, name, value)
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.ENOSPC, errno.E2BIG, errno.ERANGE):
                    raise
                self.skipped.add(name)

    def _finish_directories(self) -> None:
        """Set modes and times, children first: a change inside a directory would touch its time again."""
        listed = dict(self._layout.directories)
        for path in sorted({b".", *self._layout.parents}, reverse=True, key=lambda path: path if path != b"." else b""):
            entry = listed.get(path)
            fd = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if entry is not None:
                    os.fchmod(fd, entry.mode & _DIRECTORY_BITS)
                    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
                os.fsync(fd)
            finally:
                os.close(fd)


def remove_tree(temp: Path) -> None:
    """Remove a tree. Restored directories may lack the bits that deleting their entries needs."""
    for root, directories, _ in os.walk(temp):
        for name in directories:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(temp)


def _put_in_place(temp: Path, target: Path, replace: bool) -> None:
    """Rename the finished tree to its name. With `replace` the old one steps aside first: for an instant there is none,
    never a mixture.
    """
    if os.path.lexists(target):
        if not replace:
            raise InvalidError(f"{target} appeared during the restore")
        target.rename(temp / "old")
        try:
            (temp / "new").rename(target)
        except OSError:
            (temp / "old").rename(target)
            raise
    else:
        (temp / "new").rename(target)


def _take_back(temp: Path, target: Path) -> None:
    """Undo `_put_in_place`."""
    target.rename(temp / "new")
    if os.path.lexists(temp / "old"):
        (temp / "old").rename(target)


def _replace_tracker(new: bytes, path: bytes) -> Callable[[], None]:
    """Rename a tracker to its name; return what undoes it.

    What had the name is kept by a link: a rename would leave an instant without a tracker, and take along a directory
    that has appeared there.
    """
    old = new + b"-old"
    try:
        os.link(path, old, follow_symlinks=False)
        undo = partial(os.rename, old, path)
    except FileNotFoundError:
        undo = partial(os.unlink, path)
    except OSError:  # a file system without links, or a file of another user (proc(5), protected_hardlinks)
        undo = None
    os.rename(new, path)
    return undo or (lambda: None)


def _check_trackers(directory: Path, layout: Layout) -> None:
    """A directory cannot be replaced by a file: that is found out before anything is changed."""
    for name, _ in layout.trackers:
        path = directory / os.fsdecode(name)
        if path.is_dir() and not path.is_symlink():
            raise InvalidError(
                f"{path} is a directory, and a file of that name belongs beside the generation",
                hint="restore elsewhere",
            )


def _write_trackers(temp: Path, layout: Layout) -> dict[bytes, bytes]:
    """Write and sync the trackers below `temp`; return where each is, by name."""
    made = {name: os.fsencode(temp / f"tracker-{number}") for number, (name, _) in enumerate(layout.trackers)}
    for name, tracker in layout.trackers:
        if tracker.symlink:
            os.symlink(tracker.content, made[name])
            continue
        with open(made[name], "xb") as file:
            file.write(tracker.content)
            file.flush()
            os.fsync(file.fileno())
    return made


def _check_space(directory: Path, manifest: Manifest) -> None:
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if manifest.size > free:
        raise CachefsError(f"{manifest.generation} has {manifest.size} bytes, {directory} has {free} free")


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
