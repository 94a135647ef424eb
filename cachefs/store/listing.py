"""Pure rules about keys that the backends share."""

from __future__ import annotations

from collections.abc import Iterable

from cachefs.store.base import Listing


def fold(keys: Iterable[str], prefix: str, delimiter: str) -> Listing:
    """Return the listing of `keys` as S3's ListObjectsV2 gives it: keys under the prefix, common prefixes rolled up."""
    plain: set[str] = set()
    common: set[str] = set()
    for key in keys:
        if not key.startswith(prefix):
            continue
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if found:
            common.add(prefix + head + delimiter)
        else:
            plain.add(key)
    return Listing(tuple(sorted(plain)), tuple(sorted(common)))


def is_probe_key(prefix: str, key: str) -> bool:
    """Return whether a key lies under the store's `.probe/`, the one place where a plain delete is allowed."""
    return key.startswith(f"{prefix}/.probe/" if prefix else ".probe/")
