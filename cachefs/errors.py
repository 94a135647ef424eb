"""Every error that crosses a module border, with the exit code and errno it turns into.

A class exists only where some caller acts differently on it. `hint` tells the operator what to do.

    CachefsError                 anything else we raise                        exit 1    EIO
    ├── InvalidError             bad configuration or argument                 exit 2    EINVAL
    ├── NotFoundError            run, generation, version or path not there    exit 66   ENOENT
    ├── NoStoreError             bucket or directory of the store not there    exit 66   ENOENT
    ├── MountpointError          mountpoint busy, not empty or not mountable   exit 73   EBUSY
    ├── StagingError             staging unusable or held by another daemon    exit 74   EIO
    ├── PendingError             stopped with data that is not flushed yet     exit 75   EIO
    ├── WaitTimeout              a wait ran out                                exit 124  ETIMEDOUT
    ├── DeniedError              refused credentials, or not allowed           exit 77   EACCES
    ├── ProbeError               the store does not honour what we rely on     exit 76   EIO
    ├── FencedError              another owner holds a newer epoch             exit 79   EROFS
    ├── UnreadableError          a local file cannot be read just now          exit 1    EIO
    ├── CorruptError             bytes do not match what was promised          exit 65   EIO
    │   └── RestoreTestFailed    a candidate must not be promoted
    └── StoreError               one request to the store did not succeed      exit 69   EIO
        ├── UnavailableError     timeout, 5xx, reset, throttling: try again
        ├── ConditionFailed      412: the condition was false, or our own retry
        ├── ConditionConflict    409: two writers met; nothing is known
        ├── NoSuchUpload         a multipart upload is gone: completed or aborted
        ├── BadPart              the store refused a part, its checksum or the part list
        └── Unsupported          the store does not know the operation
"""

from __future__ import annotations

import errno
from typing import ClassVar

DAMAGE = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""What a disk says of bytes that it has lost: a bad block, or damage that ext4 or XFS has found in what describes the
file. Any other errno passes (EMFILE, ENOMEM, ENOSPC, ...): the same call may succeed later.
"""


class CachefsError(Exception):
    """Base class. `str()` is one line for the user; `hint` says what to do next (may be empty)."""

    exit_code: ClassVar[int] = 1
    errno: ClassVar[int] = errno.EIO

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class InvalidError(CachefsError):
    """A configuration value or argument is wrong; nothing was started or changed."""

    exit_code = 2
    errno = errno.EINVAL


class NotFoundError(CachefsError):
    """A run, generation, version or path does not exist, in a store that does."""

    exit_code = 66
    errno = errno.ENOENT


class NoStoreError(CachefsError):
    """The bucket or the directory of the store is not there: nothing is known of what it held.

    No kind of NotFoundError, although a shell takes it for one: who handles a version that is gone must not take a
    store that is away for it.
    """

    exit_code = NotFoundError.exit_code
    errno = NotFoundError.errno


class MountpointError(CachefsError):
    """The mountpoint is busy, not empty, or the kernel refused the mount."""

    exit_code = 73
    errno = errno.EBUSY


class StagingError(CachefsError):
    """The staging directory cannot be used, or another daemon holds it."""

    exit_code = 74


class PendingError(CachefsError):
    """The daemon stopped while data is not in the store yet; it is kept in staging."""

    exit_code = 75


class WaitTimeout(CachefsError):
    """A state was not reached in the time given."""

    exit_code = 124
    errno = errno.ETIMEDOUT


class DeniedError(CachefsError):
    """The store answered 401 or 403, or this user may not do it here."""

    exit_code = 77
    errno = errno.EACCES


class ProbeError(CachefsError):
    """The store does not honour conditions, versions or ranges that publication relies on."""

    exit_code = 76


class FencedError(CachefsError):
    """Another process holds a newer ownership epoch of the run; this one must stop publishing."""

    exit_code = 79
    errno = errno.EROFS


class UnreadableError(CachefsError):
    """A local file cannot be read for want of descriptors, memory or the like: nothing is known of it, look again."""


class CorruptError(CachefsError):
    """Bytes, sizes, versions or formats are not what was promised."""

    exit_code = 65


class RestoreTestFailed(CorruptError):
    """The restore test of a sealed manifest failed; it must not be promoted."""


class StoreError(CachefsError):
    """One request to the store did not succeed."""

    exit_code = 69


class UnavailableError(StoreError):
    """Timeout, reset, 5xx or throttling. For a write nothing is known: read back before any other step.

    `reason` is a short label for metrics (`timeout`, `reset`, `5xx`, `throttled`, `expired-credentials`, ...).
    """

    def __init__(self, message: str, *, reason: str = "unavailable", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class ConditionFailed(StoreError):
    """412, or 404 on If-Match. Never proof of a loss: an earlier copy of the same request may have won."""


class ConditionConflict(StoreError):
    """409: another write or delete met this one. Never read as "exists"."""


class NoSuchUpload(StoreError):
    """The multipart upload is unknown: completed by an earlier copy of this request, aborted or expired."""


class BadPart(StoreError):
    """The store refused a part or the part list (BadDigest, InvalidPart, EntityTooSmall, size mismatch)."""


class Unsupported(StoreError):
    """The store does not implement the operation (501, MethodNotAllowed)."""
