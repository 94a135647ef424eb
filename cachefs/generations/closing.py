"""The instant a save closes: pin every file of it, so that neither rotation nor the next save can touch its bytes."""

from __future__ import annotations

import errno
import os
import stat as stat_module
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cachefs.formats.manifest import Directory, Symlink, Tracker
from cachefs.formats.names import to_text
from cachefs.formats.records import AttemptRecord, Identity, ShardRecord
from cachefs.generations.presets import matches
from cachefs.staging.pins import Pins
from cachefs.staging.walking import open_directory, open_file
from cachefs.staging.writers import written

TRACKER_MAX = 64 << 10
"""Largest tracker file that is recorded, bytes; trackers hold a name or a number."""
_REPLACED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL})
"""How a look at a name fails when it went, or became a link or a link no more (EINVAL), since the look before."""


class ClosedSet(msgspec.Struct, frozen=True):
    """The files of a closed save, all pinned. `kept` are the ids of the early shards among them."""

    shards: tuple[ShardRecord, ...]
    symlinks: tuple[Symlink, ...]
    directories: tuple[Directory, ...]
    trackers: tuple[Tracker, ...]
    kept: frozenset[str]


class Closer:
    """Pins one save. Synchronous: for a worker thread, while the mount holds back changes of the save."""

    def __init__(
        self,
        tree_fd: int,
        pins: Pins,
        attempt: AttemptRecord,
        *,
        new_id: Callable[[], str],
        key: Callable[[str, str], str],
    ) -> None:
        """`key(shard, path)` builds the object key of a new shard."""
        self._tree_fd = tree_fd
        self._pins = pins
        self._attempt = attempt
        self._new_id = new_id
        self._key = key
        self._by_ino: dict[int, ShardRecord] = {}
        self._symlinks: list[Symlink] = []
        self._directories: list[Directory] = []

    def close(
        self, path: bytes, early: Iterable[ShardRecord], *, temp_names: Sequence[str], trackers: Sequence[str]
    ) -> ClosedSet:
        """Pin the generation at `path` and return its exact set; early shards whose bytes are unchanged keep their
        uploads.

        Raises OSError; nothing is pinned then but what was before.
        """
        known = {shard.identity.ino: shard for shard in early}
        used: set[str] = set()
        try:
            return self._close(path, known, used, temp_names, trackers)
        except OSError:
            for shard in self._by_ino.values():
                if shard.shard not in used:
                    self._pins.drop(shard.attempt, shard.shard)
            raise

    def _close(
        self,
        path: bytes,
        known: dict[int, ShardRecord],
        used: set[str],
        temp_names: Sequence[str],
        trackers: Sequence[str],
    ) -> ClosedSet:
        above, _, name = path.rpartition(b"/")
        if self._attempt.kind == "file":
            fd = open_directory(self._tree_fd, above)
            try:
                self._add(fd, name, to_text(name), known, used)
            finally:
                os.close(fd)
        else:
            fd = open_directory(self._tree_fd, path)
            try:
                self._walk(fd, known, used, temp_names)
            finally:
                os.close(fd)
        return ClosedSet(
            shards=tuple(self._by_ino.values()),
            symlinks=tuple(self._symlinks),
            directories=tuple(self._directories),
            trackers=self._trackers(above, trackers),
            kept=frozenset(used),
        )

    def _walk(self, top: int, known: dict[int, ShardRecord], used: set[str], temp_names: Sequence[str]) -> None:
        # A directory that cannot be read, which os.fwalk leaves out if it is not told, would be missing in the save.
        for root, directories, files, fd in os.fwalk(b".", dir_fd=top, follow_symlinks=False, onerror=_raise):
            below = root[2:]
            stat = os.fstat(fd)
            self._directories.append(
                Directory(to_text(below) or ".", stat_module.S_IMODE(stat.st_mode), stat.st_mtime_ns)
            )
            for name in [*directories, *files]:
                inside = below + b"/" + name if below else name
                mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
                if stat_module.S_ISLNK(mode):
                    self._symlinks.append(Symlink(to_text(inside), to_text(os.readlink(name, dir_fd=fd))))
                elif stat_module.S_ISREG(mode) and not matches(inside, temp_names):
                    self._add(fd, name, to_text(inside), known, used)

    def _add(self, fd: int, name: bytes, path: str, known: dict[int, ShardRecord], used: set[str]) -> None:
        stat = os.stat(name, dir_fd=fd, follow_symlinks=False)
        seen = self._by_ino.get(stat.st_ino)
        if seen is not None:  # another hard link to a file of this save
            self._by_ino[stat.st_ino] = msgspec.structs.replace(seen, paths=(*seen.paths, path))
            return
        early = known.get(stat.st_ino)
        if early is not None and (early.identity.size, early.identity.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            used.add(early.shard)
            shard = msgspec.structs.replace(
                early, paths=(path,), early=False, mode=stat_module.S_IMODE(stat.st_mode), xattrs=user_xattrs(fd, name)
            )
        else:
            shard = pin_file(self._pins, self._attempt, fd, name, path, new_id=self._new_id, key=self._key)
        self._by_ino[stat.st_ino] = shard

    def _trackers(self, parent: bytes, names: Sequence[str]) -> tuple[Tracker, ...]:
        found: list[Tracker] = []
        fd = open_directory(self._tree_fd, parent)
        try:
            for name in sorted(os.listdir(fd)):
                if matches(os.fsencode(name), names) and (tracker := self._tracker(name, fd)) is not None:
                    found.append(tracker)
        finally:
            os.close(fd)
        return tuple(found)

    def _tracker(self, name: str, fd: int) -> Tracker | None:
        text = to_text(os.fsencode(name))
        try:
            stat = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat_module.S_ISLNK(stat.st_mode):
                target = os.readlink(os.fsencode(name), dir_fd=fd)
                own = target.split(b"/")[0] == os.fsencode(self._attempt.generation)
                return Tracker(text, target, symlink=True) if own else None
            if stat_module.S_ISREG(stat.st_mode) and stat.st_size <= TRACKER_MAX:
                return Tracker(text, _read(name, fd))
        except OSError as error:
            # Nothing holds back who removes or replaces a tracker while the save beside it is pinned.
            if error.errno not in _REPLACED:
                raise
        return None


def pin_file(
    pins: Pins,
    attempt: AttemptRecord,
    fd: int,
    name: bytes,
    path: str,
    *,
    new_id: Callable[[], str],
    key: Callable[[str, str], str],
    early: bool = False,
) -> ShardRecord:
    """Pin one file under a new shard id and return its record.

    Raises OSError, and nothing is pinned then; ETXTBSY when somebody has the file open for writing, whatever its name.
    Who opens it after it was pinned leaves the pinned bytes alone (tree.py).
    """
    shard = new_id()[:16]
    stat = pins.add(attempt.attempt, shard, fd, name)
    try:
        if written(name, fd):
            raise OSError(errno.ETXTBSY, f"{path} is open for writing")
        xattrs = user_xattrs(fd, name)
    except OSError:
        pins.drop(attempt.attempt, shard)
        raise
    return ShardRecord(
        attempt=attempt.attempt,
        shard=shard,
        paths=(path,),
        identity=Identity(ino=stat.st_ino, size=stat.st_size, mtime_ns=stat.st_mtime_ns),
        mode=stat_module.S_IMODE(stat.st_mode),
        key=key(shard, path),
        xattrs=xattrs,
        early=early,
    )


def _raise(error: OSError) -> None:
    raise error


def user_xattrs(dir_fd: int, name: bytes) -> dict[str, bytes]:
    """Return the user's extended attributes of a file in a directory; names that are no UTF-8 are left out."""
    path = b"/proc/self/fd/%d/%s" % (dir_fd, name)
    names = [attribute for attribute in os.listxattr(path, follow_symlinks=False) if attribute.startswith("user.")]
    names = [attribute for attribute in names if os.fsencode(attribute).decode("utf-8", "replace") == attribute]
    return {attribute: os.getxattr(path, attribute, follow_symlinks=False) for attribute in names}


def _read(name: str, dir_fd: int) -> bytes:
    fd = open_file(name, dir_fd)
    try:
        return os.pread(fd, TRACKER_MAX, 0)
    finally:
        os.close(fd)
