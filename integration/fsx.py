"""Random file operations on one file, compared with a model of its bytes after each (the idea of fsx)."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

MOST = 300_000
"""Largest size of the file, bytes."""


class Checker:
    """One file and its model. The same seed does the same."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.model = bytearray()
        self.fd = -1
        self.closed = 0
        self.log: list[str] = []

    def run(self, steps: int) -> None:
        """Do random operations, from an open to a close; may be called again. Raises AssertionError with what led to
        it.
        """
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        self.compare(os.pread(self.fd, MOST * 2, 0), 0)
        operations = (
            self.write,
            self.write,
            self.read,
            self.truncate,
            self.truncate_by_path,
            self.map_and_write,
            self.append,
            self.rename,
            self.reopen,
            self.reopen_emptied,
        )
        for _ in range(steps):
            operation = self.random.choice(operations)
            detail = operation()
            self.log.append(f"{operation.__name__} {detail or ''}")
            self.check()
        os.close(self.fd)
        self.compare(self.path.read_bytes(), 0)
        assert os.stat(self.path).st_size == len(self.model)

    def check(self) -> None:
        """Compare the size, and all bytes from time to time."""
        size = os.fstat(self.fd).st_size
        assert size == len(self.model) == os.stat(self.path).st_size, self.tell(f"size {size}, not {len(self.model)}")
        if self.random.random() < 0.1:
            self.compare(self.path.read_bytes(), 0)

    def compare(self, seen: bytes, offset: int) -> None:
        wanted = self.model[offset : offset + len(seen)]
        if seen != wanted:
            where = next(at for at, (one, two) in enumerate(zip(seen, wanted, strict=False)) if one != two)
            raise AssertionError(self.tell(f"wrong byte at {offset + where}"))

    def tell(self, problem: str) -> str:
        return f"{problem} after\n" + "\n".join(self.log[-20:])

    def span(self, most: int) -> tuple[int, int]:
        offset = self.random.randrange(most + 1)
        return offset, self.random.randrange(1, 20_000)

    def put(self, offset: int, data: bytes) -> None:
        if offset > len(self.model):
            self.model.extend(bytes(offset - len(self.model)))
        self.model[offset : offset + len(data)] = data

    # ---- the operations

    def write(self) -> str:
        offset, length = self.span(MOST - 20_000)
        data = self.random.randbytes(length)
        assert os.pwrite(self.fd, data, offset) == length
        self.put(offset, data)
        return f"{length} at {offset}"

    def append(self) -> str:
        if len(self.model) > MOST:
            return "nothing"
        data = self.random.randbytes(1000)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, data)
        os.close(fd)
        self.model += data
        return ""

    def read(self) -> str:
        offset, length = self.span(len(self.model))
        seen = os.pread(self.fd, length, offset)
        assert len(seen) == min(length, len(self.model) - offset), self.tell("short read")
        self.compare(seen, offset)
        return f"{length} at {offset}"

    def truncate(self) -> str:
        size = self.random.randrange(MOST)
        os.ftruncate(self.fd, size)
        self.resize(size)
        return f"to {size}"

    def truncate_by_path(self) -> str:
        size = self.random.choice((0, len(self.model) // 2, self.random.randrange(MOST)))
        os.truncate(self.path, size)
        self.resize(size)
        return f"to {size}"

    def resize(self, size: int) -> None:
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    def map_and_write(self) -> str:
        if not self.model:
            return "nothing"
        offset = self.random.randrange(len(self.model))
        data = self.random.randbytes(min(5000, len(self.model) - offset))
        with mmap.mmap(self.fd, len(self.model)) as shared:
            self.compare(shared[offset : offset + 100], offset)
            shared[offset : offset + len(data)] = data
            if self.random.random() < 0.5:
                shared.flush()
        self.put(offset, data)
        return f"{len(data)} at {offset}"

    def rename(self) -> str:
        other = self.path.with_name(f"{self.path.stem}~.pt")
        os.rename(self.path, other)
        if self.random.random() < 0.5:
            os.rename(other, self.path)
        else:
            self.path, other = other, self.path
        return f"to {self.path.name}"

    def reopen(self, extra: int = 0) -> str:
        """Close, which makes a save of the file, and open it again at once or a little later."""
        os.close(self.fd)
        self.closed += 1
        if self.random.random() < 0.3:
            self.compare(self.path.read_bytes(), 0)
        self.fd = os.open(self.path, os.O_RDWR | extra)
        return ""

    def reopen_emptied(self) -> str:
        self.reopen(os.O_TRUNC)
        self.model.clear()
        return ""
