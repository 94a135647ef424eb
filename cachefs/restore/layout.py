"""What a manifest may contain: the checks of its paths, pure. A manifest comes from the bucket, so it is not trusted.

A manifest that passes describes a tree in which every path lies below the generation's root, no path is named twice, no
path goes through a file or a symbolic link, and whose sizes and digests are consistent with each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cachefs.errors import CorruptError
from cachefs.formats.manifest import Directory, Manifest, Shard, Symlink, Tracker
from cachefs.formats.names import checked_path, to_bytes
from cachefs.restore.shards import check_arithmetic


class Layout(msgspec.Struct, frozen=True):
    """A checked manifest as byte paths. `root` is the name of the generation; the paths of files, links and directories
    are relative to it, of trackers to the directory that holds it. `parents` are all directories needed, parents first.
    With `single` the generation is the one file itself.
    """

    root: bytes
    single: bool
    files: tuple[tuple[tuple[bytes, ...], Shard], ...]
    symlinks: tuple[tuple[bytes, bytes], ...]
    directories: tuple[tuple[bytes, Directory], ...]
    parents: tuple[bytes, ...]
    trackers: tuple[tuple[bytes, Tracker], ...]


def check_manifest(manifest: Manifest) -> Layout:
    """Check a manifest and return its layout. Raises CorruptError that names the path."""
    root = _name(manifest.generation)
    for shard in manifest.shards:
        check_arithmetic(shard)
    if manifest.kind == "file":
        return _single_file(manifest, root)
    kinds: dict[bytes, str] = {}
    files = tuple((tuple(_claim(kinds, path, "file") for path in _paths(shard)), shard) for shard in manifest.shards)
    symlinks = tuple((_claim(kinds, link.path, "symlink"), _target(link)) for link in manifest.symlinks)
    directories = tuple(
        (_claim(kinds, entry.path, "directory") if entry.path != "." else b".", entry) for entry in manifest.directories
    )
    if sum(path == b"." for path, _ in directories) > 1:
        raise CorruptError("path '.' is twice in the manifest")
    parents = _parents(kinds)
    for parent in parents:
        if kinds.get(parent, "directory") != "directory":
            raise CorruptError(f"{parent!r} is a {kinds[parent]} in the manifest, and there are paths below it")
    needed = sorted(parents | {path for path, kind in kinds.items() if kind == "directory"})
    return Layout(root, False, files, symlinks, directories, tuple(needed), _trackers(manifest, root))


def _single_file(manifest: Manifest, root: bytes) -> Layout:
    if len(manifest.shards) != 1 or manifest.symlinks or manifest.directories:
        raise CorruptError(f"{manifest.generation} is one file, but its manifest holds more or less than that")
    (shard,) = manifest.shards
    if [checked_path(path) for path in _paths(shard)] != [root]:
        raise CorruptError(f"{manifest.generation} is one file, but its manifest names {shard.paths[0]}")
    return Layout(root, True, (((root,), shard),), (), (), (), _trackers(manifest, root))


def _paths(shard: Shard) -> Iterable[str]:
    if not shard.paths:
        raise CorruptError(f"{shard.pin.key} has no path in the manifest")
    return shard.paths


def _claim(kinds: dict[bytes, str], text: str, kind: str) -> bytes:
    path = checked_path(text)
    if path in kinds:
        raise CorruptError(f"path {text!r} is twice in the manifest")
    kinds[path] = kind
    return path


def _parents(paths: Iterable[bytes]) -> set[bytes]:
    found: set[bytes] = set()
    for path in paths:
        while b"/" in path:
            path = path.rpartition(b"/")[0]
            if path in found:
                break
            found.add(path)
    return found


def _target(link: Symlink) -> bytes:
    target = to_bytes(link.target)
    if not target or b"\0" in target:
        raise CorruptError(f"symbolic link {link.path!r} has an impossible target")
    return target


def _name(text: str) -> bytes:
    path = checked_path(text)
    if b"/" in path:
        raise CorruptError(f"{text!r} is a path, where a name was expected")
    return path


def _trackers(manifest: Manifest, root: bytes) -> tuple[tuple[bytes, Tracker], ...]:
    found: dict[bytes, Tracker] = {}
    for tracker in manifest.trackers:
        name = _name(tracker.path)
        if name == root or name in found:
            raise CorruptError(f"tracker {tracker.path!r} has the name of another entry")
        if tracker.symlink and (not tracker.content or b"\0" in tracker.content):
            raise CorruptError(f"tracker {tracker.path!r} has an impossible target")
        found[name] = tracker
    return tuple(found.items())
