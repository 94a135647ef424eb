"""A training process whose file system dies under it: `outlive.py DIRECTORY`.

Opens, maps and half writes files, then does a round of calls for every `calls` on its standard input, uses its maps for
`maps`, and reads a page for `unread` that was not read before; prints what each call gave: a value, or the name of its
error. `end` closes everything. A signal ends it, as it would a real one.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 100_000


def failing(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        result = call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return result.decode() if isinstance(result, bytes) else result


def main() -> None:
    d = Path(sys.argv[1])
    (d / "seen.bin").write_bytes(b"s" * SIZE)
    (d / "unseen.bin").write_bytes(b"u" * SIZE)
    seen = os.open(d / "seen.bin", os.O_RDWR)
    os.pread(seen, SIZE, 0)
    unseen = os.open(d / "unseen.bin", os.O_RDONLY)
    append = os.open(d / "append.bin", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(append, b"before ")
    half = os.open(d / "half.pt", os.O_WRONLY | os.O_CREAT)
    os.write(half, b"first half, ")
    shared = mmap.mmap(seen, SIZE)
    shared[0:6] = b"mapped"
    private = mmap.mmap(unseen, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    print(json.dumps("ready"), flush=True)
    at = 0
    for line in sys.stdin:
        if line == "end\n":
            break
        if line == "unread\n":
            found: Any = private[SIZE - 1 :].decode()
        elif line == "maps\n":
            shared[at + 100 : at + 106] = b"shared"
            shared.flush()
            with mmap.mmap(seen, SIZE) as another:
                found = [shared[0:6].decode(), shared[at : at + 6].decode(), another[at + 100 : at + 106].decode()]
        else:
            at += 1000
            found = {
                "read": failing(os.pread, seen, 6, 0),
                "read what was not read before": failing(os.pread, unseen, 3, SIZE - 3),
                "write": failing(os.pwrite, seen, b"after ", at),
                "append": failing(os.write, append, b"after "),
                "write the second half": failing(os.write, half, b"second half, "),
                "fstat": failing(lambda: os.fstat(half).st_size),
                "fsync": failing(os.fsync, half),
                "ftruncate": failing(os.ftruncate, append, 3),
                "stat": failing(lambda: stat.S_ISDIR(os.stat(d).st_mode)),
                "open": failing(lambda: os.close(os.open(d / "seen.bin", os.O_RDONLY))),
            }
        print(json.dumps(found), flush=True)
    shared.close()
    private.close()
    closes = [failing(os.close, fd) for fd in (seen, unseen, append, half)]
    print(json.dumps(closes), flush=True)


main()
