"""A training process that writes a file through a shared map whose descriptor it has closed: `mapping.py FILE SIZE`.

The map is the C library's: Python's own keeps a descriptor. Each line on its standard input is written at the start of
the map; `unmap` ends it. Says `done` each time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = int(sys.argv[2])
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, size)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    os.close(fd)
    print("done", flush=True)
    for line in sys.stdin:
        if line == "unmap\n":
            assert libc.munmap(address, size) == 0
        else:
            ctypes.memmove(address, line.encode(), len(line))
        print("done", flush=True)


main()
