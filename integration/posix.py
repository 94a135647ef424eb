"""Scripts of system calls whose results must be the same on the mount as on a local disk.

Each takes an empty directory and returns what it saw; `failing` turns an error into its name. Files are called `x.pt`
where their closes shall make saves of them, so that pins come and go while a script works.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Script = Callable[[Path], Any]
SCRIPTS: list[Script] = []
LONG_AGO = 1_500_000_000 * 10**9 + 123
_libc = ctypes.CDLL(None, use_errno=True)


def script(function: Script) -> Script:
    SCRIPTS.append(function)
    return function


def failing(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a call returns, or the name of its error."""
    try:
        return call(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def tree(directory: Path) -> dict[str, Any]:
    """Return all names below a directory with type, mode, links, size and bytes or target."""
    found: dict[str, Any] = {}
    for root, directories, files in os.walk(os.fsencode(directory)):
        for name in [*directories, *files]:
            path = os.path.join(root, name)
            seen = os.lstat(path)
            content: bytes | int = seen.st_size
            if stat.S_ISLNK(seen.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(seen.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            links = seen.st_nlink if not stat.S_ISDIR(seen.st_mode) else 0  # file systems count these differently
            found[os.fsdecode(path[len(os.fsencode(directory)) + 1 :])] = (oct(seen.st_mode), links, content)
    return found


def put(path: Path, data: bytes, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> None:
    fd = os.open(path, flags, 0o644)
    try:
        assert os.write(fd, data) == len(data)
    finally:
        os.close(fd)


@script
def rename_over_an_existing_file_while_the_source_is_open(d: Path) -> Any:
    """As safetensors and TensorStore do: rename first, write on, close later."""
    put(d / "x.pt", b"old")
    fd = os.open(d / ".tmp", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"new")
    os.rename(d / ".tmp", d / "x.pt")
    os.write(fd, b" and more")
    seen = (d / "x.pt").read_bytes(), os.path.samestat(os.fstat(fd), os.stat(d / "x.pt"))
    os.close(fd)
    return seen, tree(d)


@script
def rename_directories(d: Path) -> Any:
    """To a new name, onto an empty directory, nested ones, into themselves, onto what is in the way."""
    (d / "tmp-1/inner/deep").mkdir(parents=True)
    put(d / "tmp-1/inner/deep/x.pt", b"x")
    fd = os.open(d / "tmp-1/inner/deep/x.pt", os.O_RDWR)
    (d / "empty").mkdir()
    (d / "full").mkdir()
    put(d / "full/file", b"")
    seen = [
        failing(os.rename, d / "tmp-1", d / "final"),
        failing(os.rename, d / "final", d / "empty"),
        failing(os.rename, d / "empty", d / "full"),
        failing(os.rename, d / "empty", d / "empty/inner/below"),
        failing(os.rename, d / "empty", d / "full/file"),
        failing(os.rename, d / "full/file", d / "empty"),
        failing(os.rename, d / "empty/inner/deep", d / "lifted"),
        failing(os.rename, d / "missing", d / "new"),
        failing(os.rename, d / "full", d / "full"),
    ]
    os.write(fd, b"written after three renames")
    os.close(fd)
    return seen, tree(d)


@script
def open_flags(d: Path) -> Any:
    """ftruncate up front, O_TRUNC, O_EXCL, O_APPEND, r+b and a seek to the end, rewriting without truncation."""
    seen = []
    fd = os.open(d / "x.pt", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, 100_000)
    seen.append((os.fstat(fd).st_size, os.fstat(fd).st_blocks))
    os.pwrite(fd, b"end", 99_997)
    seen.append(os.pread(fd, 5, 99_995))
    os.close(fd)
    seen.append(failing(os.open, d / "x.pt", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    with open(d / "x.pt", "r+b") as stream:
        seen.append((stream.seek(0, os.SEEK_END), stream.write(b"appended")))
    put(d / "x.pt", b"HEAD", os.O_WRONLY)
    seen.append(((d / "x.pt").read_bytes()[:6], os.stat(d / "x.pt").st_size))
    put(d / "x.pt", b"short")
    with open(d / "x.pt", "ab") as first, open(d / "x.pt", "a+b") as second:
        for number in range(3):
            first.write(b"1")
            first.flush()
            second.write(b"2")
            second.flush()
            seen.append((number, first.tell(), second.tell()))
        second.seek(0)
        seen.append(second.read())
    os.truncate(d / "x.pt", 4)
    seen.append((failing(os.truncate, d / "x.pt", -1), failing(os.truncate, d, 1)))
    seen.append(failing(os.open, d / "x.pt", os.O_RDONLY | os.O_DIRECTORY))
    seen.append(failing(os.open, d, os.O_WRONLY))
    os.close(os.open(d / "empty.pt", os.O_RDONLY | os.O_CREAT, 0o640))
    os.close(os.open(d / "x.pt", os.O_RDONLY | os.O_TRUNC))
    return seen, tree(d)


@script
def direct_io(d: Path) -> Any:
    """O_DIRECT with multiples of 512 bytes from an aligned buffer, then an unaligned tail without it."""
    fd = os.open(d / "x.pt", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    with mmap.mmap(-1, 8192) as buffer:
        buffer.write(bytes(range(256)) * 32)
        seen = [os.pwrite(fd, buffer, 0), os.pwrite(fd, buffer, 8192)]
        seen.append(os.preadv(fd, [buffer], 4096))
    os.close(fd)
    put(d / "x.pt", b"tail", os.O_WRONLY | os.O_APPEND)
    return seen, tree(d)


@script
def syncs(d: Path) -> Any:
    """fsync and fdatasync of files, fsync of directories, sync_file_range by another descriptor, O_SYNC writes."""
    fd = os.open(d / "x.pt", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x")
    seen = [failing(os.fsync, fd), failing(os.fdatasync, fd)]
    os.close(fd)
    fd = os.open(d / "y.pt", os.O_WRONLY | os.O_CREAT | os.O_SYNC)
    seen.append(os.write(fd, b"synchronous"))
    os.close(fd)
    fd = os.open(d / "x.pt", os.O_RDONLY)
    seen.append(failing(os.fsync, fd))
    os.close(fd)
    fd = os.open(d, os.O_RDONLY | os.O_DIRECTORY)
    seen += [failing(os.fsync, fd), failing(os.fdatasync, fd)]
    os.close(fd)
    return seen, tree(d)


@script
def locks(d: Path) -> Any:
    """OFD locks of ranges and flock conflict between descriptors of one process, and end with them."""
    set_ofd, get_ofd = 37, 36  # F_OFD_SETLK, F_OFD_GETLK (fcntl.h)
    one, two = (os.open(d / "__lock", os.O_RDWR | os.O_CREAT) for _ in range(2))

    def range_lock(kind: int, start: int, length: int) -> bytes:
        return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)

    seen = [
        failing(fcntl.fcntl, one, set_ofd, range_lock(fcntl.F_WRLCK, 0, 10)) != "EAGAIN",
        failing(fcntl.fcntl, two, set_ofd, range_lock(fcntl.F_WRLCK, 5, 10)),
        failing(fcntl.fcntl, two, set_ofd, range_lock(fcntl.F_RDLCK, 10, 10)) != "EAGAIN",
        struct.unpack("hhqqi4x", fcntl.fcntl(two, get_ofd, range_lock(fcntl.F_RDLCK, 0, 10)))[0] == fcntl.F_WRLCK,
        failing(fcntl.flock, one, fcntl.LOCK_EX | fcntl.LOCK_NB),
        failing(fcntl.flock, two, fcntl.LOCK_SH | fcntl.LOCK_NB),
        failing(fcntl.lockf, two, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 100),
    ]
    os.rename(d / "__lock", d / "renamed")
    seen.append(failing(fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB))
    os.close(one)
    seen.append(failing(fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB))
    os.close(two)
    return seen


@script
def symbolic_links(d: Path) -> Any:
    """To files, directories and nothing; read, re-created, removed, looped; their own times and mode."""
    (d / "step-1").mkdir()
    put(d / "step-1/x.pt", b"x")
    os.symlink("step-1", d / "latest")
    os.symlink("nowhere", d / "dangling")
    os.symlink("loop", d / "loop")
    os.symlink("latest/x.pt", d / "file.pt")
    os.utime(d / "latest", ns=(LONG_AGO, LONG_AGO), follow_symlinks=False)
    seen = [
        os.readlink(d / "latest"),
        os.lstat(d / "latest").st_mtime_ns,
        os.stat(d / "latest").st_mtime_ns == LONG_AGO,
        (d / "file.pt").read_bytes(),
        sorted(os.listdir(d / "latest")),
        failing(os.stat, d / "dangling"),
        failing(os.stat, d / "loop"),
        failing(os.open, d / "latest", os.O_RDONLY | os.O_NOFOLLOW),
        failing(os.symlink, "other", d / "latest"),
        failing(os.readlink, d / "step-1"),
        failing(os.rmdir, d / "latest"),
    ]
    os.unlink(d / "latest")
    (d / "step-2").mkdir()
    os.symlink("step-2", d / "latest")
    seen += [os.readlink(d / "latest"), os.listdir(d / "latest")]
    put(d / "dangling", b"written through the link")
    return seen, tree(d)


@script
def hard_links(d: Path) -> Any:
    """As timm does: link a finished file under more names, overwrite and remove some; counts are truthful."""
    put(d / "last.pt", b"one")
    seen = []
    os.link(d / "last.pt", d / "checkpoint-1.pt")
    os.link(d / "last.pt", d / "best.pt")
    seen.append([os.stat(d / name).st_nlink for name in ("last.pt", "checkpoint-1.pt", "best.pt")])
    seen.append(os.path.samefile(d / "last.pt", d / "best.pt"))
    put(d / "tmp", b"two")
    os.replace(d / "tmp", d / "last.pt")
    seen.append([os.stat(d / name).st_nlink for name in ("last.pt", "checkpoint-1.pt", "best.pt")])
    put(d / "best.pt", b"three", os.O_WRONLY)
    seen.append((d / "checkpoint-1.pt").read_bytes())
    put(d / "best.pt", b"4")
    seen.append((d / "checkpoint-1.pt").read_bytes())
    os.rename(d / "best.pt", d / "checkpoint-1.pt")  # two names of one file: both stay
    seen.append(sorted(os.listdir(d)))
    seen.append(failing(os.link, d / "last.pt", d / "best.pt"))
    seen.append(failing(os.link, d, d / "directory"))
    seen.append(failing(os.link, d / "missing", d / "new"))
    os.unlink(d / "best.pt")
    return seen, tree(d)


@script
def modes_and_times(d: Path) -> Any:
    """chmod, and utimensat with dates of the past, on files that were closed a moment ago; nanoseconds are kept."""
    seen = []
    put(d / "x.pt", b"x")
    for mode in (0o600, 0o444, 0o4755, 0o2755, 0o644):
        os.chmod(d / "x.pt", mode)
        seen.append(oct(os.stat(d / "x.pt").st_mode))
    os.utime(d / "x.pt", ns=(LONG_AGO, LONG_AGO + 1))
    seen.append((os.stat(d / "x.pt").st_atime_ns, os.stat(d / "x.pt").st_mtime_ns))
    (d / "step-1").mkdir()
    os.utime(d / "step-1", ns=(LONG_AGO, LONG_AGO))
    seen.append(os.stat(d / "step-1").st_mtime_ns)
    fd = os.open(d / "x.pt", os.O_RDWR)
    os.fchmod(fd, 0o640)
    os.utime(fd, ns=(LONG_AGO, LONG_AGO + 2))
    seen.append((oct(os.fstat(fd).st_mode), os.fstat(fd).st_mtime_ns))
    os.close(fd)
    os.chown(d / "x.pt", 1234, 5678)
    seen.append((os.stat(d / "x.pt").st_uid, os.stat(d / "x.pt").st_gid))
    seen.append([os.access(d / "x.pt", right) for right in (os.R_OK, os.W_OK, os.X_OK)])
    shutil.copy2(d / "x.pt", d / "y.pt")
    seen.append(os.stat(d / "y.pt").st_mtime_ns)
    return seen, tree(d)


@script
def truthful_times(d: Path) -> Any:
    """Which calls move the time of a file, of its directory: exactly those that do so on a local disk."""
    put(d / "x.pt", b"first")
    (d / "inner").mkdir()

    def moved(call: Callable[..., Any], *arguments: Any) -> tuple[bool, bool, bool]:
        places = (d, d / "x.pt", d / "inner")
        for place in places:
            os.utime(place, ns=(LONG_AGO, LONG_AGO))
        call(*arguments)
        return tuple(os.stat(place).st_mtime_ns != LONG_AGO for place in places)  # type: ignore[return-value]

    return [
        moved(os.stat, d / "x.pt"),
        moved((d / "x.pt").read_bytes),
        moved(put, d / "x.pt", b"rewritten"),
        moved(put, d / "x.pt", b"part", os.O_WRONLY),
        moved(put, d / "x.pt", b"more", os.O_WRONLY | os.O_APPEND),
        moved(os.truncate, d / "x.pt", 2),
        moved(os.chmod, d / "x.pt", 0o600),
        moved(os.setxattr, d / "x.pt", "user.note", b"x"),
        moved(put, d / "y.pt", b"new"),
        moved(os.rename, d / "y.pt", d / "z.pt"),
        moved(os.rename, d / "z.pt", d / "inner/z.pt"),
        moved(os.link, d / "inner/z.pt", d / "link.pt"),
        moved(os.unlink, d / "link.pt"),
        moved(os.mkdir, d / "inner/deep"),
        moved(os.rmdir, d / "inner/deep"),
        moved(os.symlink, "x", d / "inner/link"),
        moved(os.rename, d / "inner", d / "inner"),
    ]


@script
def extended_attributes(d: Path) -> Any:
    """set, list, get, remove, XATTR_CREATE and XATTR_REPLACE; on files, directories, descriptors; kept on rewriting."""
    put(d / "x.pt", b"x")
    (d / "step-1").mkdir()
    seen = []
    for place in (d / "x.pt", d / "step-1"):
        os.setxattr(place, "user.origin", b"a" * 1000)
        os.setxattr(place, b"user.\xff", b"")
        seen += [
            sorted(os.listxattr(place)),
            os.getxattr(place, "user.origin"),
            failing(os.getxattr, place, "user.missing"),
            failing(os.removexattr, place, "user.missing"),
            failing(os.setxattr, place, "user.origin", b"b", os.XATTR_CREATE),
            failing(os.setxattr, place, "user.missing", b"b", os.XATTR_REPLACE),
            failing(os.setxattr, place, "user.origin", b"b", os.XATTR_REPLACE),
            os.getxattr(place, "user.origin"),
        ]
        os.removexattr(place, b"user.\xff")
    put(d / "x.pt", b"rewritten")
    fd = os.open(d / "x.pt", os.O_RDONLY)
    seen += [os.getxattr(fd, "user.origin"), os.listxattr(fd)]
    os.close(fd)
    return seen


@script
def copies_inside_the_kernel(d: Path) -> Any:
    """sendfile and copy_file_range, from and to files of the directory; posix_fallocate; preadv and pwritev."""
    put(d / "source", os.urandom(0) + bytes(range(256)) * 1000)
    source = os.open(d / "source", os.O_RDONLY)
    target = os.open(d / "x.pt", os.O_RDWR | os.O_CREAT)
    done = 0
    while done < 256_000:
        done += os.sendfile(target, source, done, 256_000 - done)
    done = 0
    while done < 1000:
        done += os.copy_file_range(source, target, 1000 - done, done, 300_000 + done)
    os.posix_fallocate(target, 0, 400_000)
    seen = [os.fstat(target).st_size, os.pwritev(target, [b"ab", b"cd"], 10), os.pread(target, 6, 9)]
    os.close(source)
    os.close(target)
    shutil.copyfile(d / "x.pt", d / "y.pt")
    return seen, tree(d)


@script
def memory_maps(d: Path) -> Any:
    """MAP_PRIVATE with PROT_WRITE as torch.load(mmap=True) makes it: changes stay private. MAP_SHARED writes the file,
    also when the descriptor is closed first.
    """
    put(d / "x.pt", b"0123456789" * 1000)
    fd = os.open(d / "x.pt", os.O_RDWR)
    with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as private:
        private[0:4] = b"mine"
        seen = [private[0:6], os.pread(fd, 6, 0)]
    shared = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    shared[5000:5004] = b"ours"
    seen.append(os.pread(fd, 6, 4999))
    os.pwrite(fd, b"theirs", 6000)
    seen.append(shared[5999:6007])
    shared.flush()
    os.close(fd)
    shared[7000:7005] = b"later"
    shared.close()
    return seen, tree(d)


@script
def unlinked_open_files(d: Path) -> Any:
    """Written, read, grown and described until they are closed; the name is free at once."""
    fd = os.open(d / "x.pt", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"first")
    other = os.open(d / "x.pt", os.O_RDONLY)
    os.unlink(d / "x.pt")
    put(d / "x.pt", b"another file")
    os.write(fd, b" second")
    os.fchmod(fd, 0o640)
    os.utime(fd, ns=(LONG_AGO, LONG_AGO))
    seen = [os.pread(other, 50, 0), os.fstat(fd).st_nlink, oct(os.fstat(fd).st_mode), os.fstat(fd).st_mtime_ns]
    os.ftruncate(fd, 3)
    os.setxattr(fd, "user.note", b"x")
    seen += [os.fstat(fd).st_size, os.getxattr(fd, "user.note"), os.pread(other, 50, 0), failing(os.fsync, fd)]
    again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_TRUNC)
    os.write(again, b"by another way")
    seen.append(os.pread(other, 50, 0))
    for descriptor in (fd, other, again):
        os.close(descriptor)
    return seen, tree(d)


@script
def reading_back_before_the_close(d: Path) -> Any:
    """By the writer, by another descriptor, and by path, while it is still open for writing."""
    with open(d / "x.pt", "w+b", buffering=0) as stream:
        stream.write(b"a" * 10_000)
        seen = [stream.seek(5), stream.read(3), (d / "x.pt").stat().st_size, (d / "x.pt").read_bytes()[-2:]]
        stream.seek(9_998)
        stream.write(b"bcde")
        seen.append((d / "x.pt").read_bytes()[-6:])
    return seen


@script
def special_files(d: Path) -> Any:
    """A fifo passes bytes, a socket can be bound, mknod makes regular files; their types are told in listings."""
    os.mkfifo(d / "fifo", 0o600)
    os.mknod(d / "x.pt", stat.S_IFREG | 0o640)
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(d, os.O_PATH)
        bound.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append((d / "fifo").read_bytes()))
    reader.start()
    put(d / "fifo", b"through the fifo", os.O_WRONLY)
    reader.join()
    types = sorted((entry.name, entry.is_file(), entry.stat().st_mode) for entry in os.scandir(d))
    seen = [received, types, failing(os.mkfifo, d / "fifo")]
    for name in ("fifo", "socket"):
        os.unlink(d / name)
    return seen, tree(d)


@script
def rename_flags(d: Path) -> Any:
    """RENAME_NOREPLACE and RENAME_EXCHANGE, of files, of a file with a directory, of what is missing."""

    def renameat2(old: str, new: str, flags: int) -> str:
        at = -100  # AT_FDCWD
        result = _libc.renameat2(at, os.fsencode(d / old), at, os.fsencode(d / new), flags)
        return "" if result == 0 else errno.errorcode[ctypes.get_errno()]

    put(d / "x.pt", b"x")
    put(d / "y.pt", b"y")
    (d / "directory").mkdir()
    put(d / "directory/inside", b"")
    fd = os.open(d / "x.pt", os.O_WRONLY)
    seen = [
        renameat2("x.pt", "y.pt", 1),
        renameat2("x.pt", "z.pt", 1),
        renameat2("z.pt", "y.pt", 2),
        renameat2("y.pt", "missing", 2),
        renameat2("y.pt", "directory", 2),
        renameat2("y.pt", "y.pt", 4 | 1),
    ]
    os.write(fd, b"written after the exchanges")
    os.close(fd)
    return seen, tree(d)


@script
def errors(d: Path) -> Any:
    """The error of each wrong call is the local disk's."""
    (d / "full").mkdir()
    put(d / "full/file", b"x")
    os.symlink("loop", d / "loop")
    long = "n" * 256
    return [
        failing(put, d / long, b""),
        failing(os.mkdir, d / long),
        failing(os.rename, d / "full/file", d / long),
        failing(os.symlink, "x", d / long),
        failing(os.stat, d / long),
        failing(os.stat, d / ("d/" * 3000)),
        failing(os.rmdir, d / "full"),
        failing(os.mkdir, d / "full"),
        failing(os.mkdir, d / "missing/inner"),
        failing(os.rmdir, d / "full/file"),
        failing(os.unlink, d / "full"),
        failing(os.unlink, d / "missing"),
        failing(os.rmdir, d / "full/."),
        failing(os.listdir, d / "full/file"),
        failing(os.stat, d / "full/file/inner"),
        failing(os.stat, d / "loop/inner"),
        failing(os.open, d / "loop", os.O_RDONLY),
        failing(os.open, d / "missing", os.O_WRONLY),
        failing(os.open, d / "full", os.O_RDWR),
        failing(os.chmod, d / "missing", 0o600),
        failing(os.readlink, d / "full/file"),
        failing(os.truncate, d / "missing", 0),
    ]


@script
def names_of_any_bytes(d: Path) -> Any:
    """255 bytes, no UTF-8, line breaks, quotes and dots: created, listed, opened, renamed, removed."""
    names = [b"n" * 255, b"\xff\xfe.pt", b"a\nb", b"'\"\\ \t", b"...", b"-", "ü".encode() * 127, b"[x]%s{y}", b"\x01"]
    raw = os.fsencode(d)
    for number, name in enumerate(names):
        put(Path(os.fsdecode(raw + b"/" + name)), b"%d" % number)
    listed = sorted(os.listdir(raw))
    for name in names[:4]:
        os.rename(raw + b"/" + name, raw + b"/renamed-" + name[:200])
    os.unlink(raw + b"/...")
    return listed == sorted(names), tree(d)


@script
def umask_and_modes(d: Path) -> Any:
    """The caller's umask counts, whatever the daemon's is; set-group-id directories hand the bit on."""
    seen: list[Any] = []
    for mask in (0, 0o002, 0o027, 0o077):
        old = os.umask(mask)
        try:
            os.close(os.open(d / f"file-{mask}", os.O_WRONLY | os.O_CREAT, 0o777))
            os.mkdir(d / f"dir-{mask}", 0o777)
            os.mkfifo(d / f"fifo-{mask}", 0o666)
        finally:
            os.umask(old)
        seen += [oct(os.stat(d / f"{kind}-{mask}").st_mode) for kind in ("file", "dir", "fifo")]
    os.chmod(d / "dir-0", 0o2777)
    os.mkdir(d / "dir-0/inner", 0o755)
    os.mkdir(d / "sticky", 0o1777)
    os.close(os.open(d / "set-id", os.O_WRONLY | os.O_CREAT, 0o4755))
    seen += [oct(os.stat(d / name).st_mode) for name in ("dir-0/inner", "sticky", "set-id")]
    return seen


@script
def a_directory_that_is_removed_under_its_user(d: Path) -> Any:
    """It is still a directory, empty, and nothing can be made in it."""
    (d / "gone").mkdir()
    fd = os.open(d / "gone", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(d / "gone")
    seen = [
        stat.S_ISDIR(os.fstat(fd).st_mode),
        failing(os.listdir, fd),
        failing(os.mkdir, "inner", dir_fd=fd),
        failing(os.open, "file", os.O_WRONLY | os.O_CREAT, dir_fd=fd),
        failing(os.fsync, fd),
    ]
    os.close(fd)
    return seen
