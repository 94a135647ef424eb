"""What the mount reports and answers, operation by operation."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext

import pytest
import trio
import trio.testing

from cachefs.errors import StagingError
from cachefs.mount import namespace
from cachefs.mount.attributes import Update
from cachefs.mount.inodes import ROOT_ID
from cachefs.mount.namespace import RENAME_EXCHANGE
from cachefs.staging.changes import Kind
from tests.mount.world import ME


def fails(code: int):
    return pytest.raises(OSError, check=lambda error: error.errno == code)


async def test_a_file_is_reported_closed_when_its_last_writer_is_gone_and_where_it_is_then(world):
    first = await world.create(b"tmp")
    second = await world.open(b"tmp", os.O_WRONLY)
    reader = await world.open(b"tmp")
    await world.rename(b"tmp", b"x.pt")
    await world.content.release(first)
    assert world.observer.told() == [(Kind.CREATED, b"tmp"), (Kind.OPENED, b"tmp"), (Kind.RENAMED, b"x.pt")]
    await world.content.release(second)
    assert world.observer.told() == [(Kind.CLOSED, b"x.pt")]
    await world.content.release(reader)
    assert world.observer.told() == []


@pytest.mark.parametrize("flags", [os.O_RDONLY | os.O_CREAT, os.O_RDONLY | os.O_TRUNC])
async def test_a_change_without_a_writable_handle_is_reported_finished_at_once(world, flags):
    """open(O_RDONLY | O_CREAT) makes a file that nobody will ever close as a writer."""
    if flags & os.O_CREAT:
        await world.create(b"x.pt", os.O_RDONLY)
        assert world.observer.told() == [(Kind.CREATED, b"x.pt"), (Kind.CLOSED, b"x.pt")]
    else:
        await world.put(b"x.pt", b"first")
        world.observer.told()
        await world.open(b"x.pt", flags)
        assert world.observer.told() == [(Kind.TRUNCATED, b"x.pt"), (Kind.CLOSED, b"x.pt")]


async def test_truncating_by_path_is_a_change_of_its_own_unless_somebody_writes_the_file(world):
    await world.put(b"x.pt", b"first")
    world.observer.told()
    node = world.node(b"x.pt")
    await world.attributes.update(node, Update(size=2))
    assert world.observer.told() == [(Kind.TRUNCATED, b"x.pt"), (Kind.CLOSED, b"x.pt")]
    await world.open(b"x.pt", os.O_WRONLY)
    world.observer.told()
    await world.attributes.update(node, Update(size=1))
    assert world.observer.told() == []
    assert await world.read(b"x.pt") == b"f"


async def test_an_unlinked_open_file_lives_until_it_is_released_and_reports_nothing(world):
    handle = await world.create(b"x.pt")
    node = world.node(b"x.pt")
    await world.unlink(b"x.pt")
    world.observer.told()
    await world.content.write(handle, 0, b"still here")
    assert world.content.read(handle, 0, 20) == b"still here"
    assert world.tree.stat(node).st_nlink == 0
    await world.attributes.update(node, Update(size=5, mode=0o600, mtime_ns=10**18))
    assert (world.tree.stat(node).st_size, world.tree.stat(node).st_mtime_ns) == (5, 10**18)
    await world.content.release(handle)
    assert world.observer.told() == []


async def test_a_removed_directory_is_still_one_for_who_is_in_it(world):
    node = await world.mkdir(b"d")
    await world.names.rmdir(1, b"d")
    assert stat.S_ISDIR(world.tree.stat(node).st_mode)
    with fails(errno.ENOENT):
        await world.content.create(node.id, b"x", 0o644, os.O_RDWR, ME)


async def test_names_are_as_long_as_the_local_disk_allows(world):
    await world.put(b"n" * 255, b"x")
    assert await world.read(b"n" * 255) == b"x"
    for call in (world.create(b"n" * 256), world.mkdir(b"n" * 256)):
        with fails(errno.ENAMETOOLONG):
            await call
    with fails(errno.ENAMETOOLONG):
        world.names.lookup(1, b"n" * 256)


async def test_the_umask_of_the_daemon_does_not_count(world):
    """The kernel has applied the caller's already."""
    old = os.umask(0o077)
    try:
        await world.create(b"file", mode=0o666)
        await world.mkdir(b"directory", 0o777)
        await world.names.mknod(1, b"fifo", stat.S_IFIFO | 0o666, 0, ME)
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE((world.staging.tree / name).lstat().st_mode) for name in ("file", "directory", "fifo")}
    assert modes == {"file": 0o666, "directory": 0o777, "fifo": 0o666}


async def test_a_set_group_id_directory_hands_the_bit_on_to_directories_only(world):
    node = await world.mkdir(b"d", 0o755)
    await world.attributes.update(node, Update(mode=0o2775))
    inner = await world.mkdir(b"d/inner", 0o755)
    assert stat.S_IMODE(world.tree.stat(inner).st_mode) == 0o2755
    await world.create(b"d/file", mode=0o644)
    assert stat.S_IMODE(world.tree.stat(world.node(b"d/file")).st_mode) == 0o644


async def test_private_attributes_are_answers_not_storage(world):
    await world.put(b"x.pt", b"first")
    node = world.node(b"x.pt")
    await world.attributes.setxattr(node, "user.note", b"mine")
    assert world.attributes.getxattr(node, "user.cachefs.state") == b"staged"
    assert world.attributes.listxattr(node) == ["user.note"]
    with fails(errno.ENODATA):
        world.attributes.getxattr(node, "user.cachefs.nothing")
    with fails(errno.EBUSY):
        await world.attributes.setxattr(node, "user.cachefs.close", b"1")
    for name in ("user.cachefs.state", "trusted.x", "security.capability"):
        with fails(errno.EOPNOTSUPP):
            world.attributes.removexattr(node, name)
    with fails(errno.EOPNOTSUPP):
        world.attributes.getxattr(node, "system.posix_acl_access")


async def test_an_unlinked_file_is_not_mistaken_for_the_mount_root(world):
    """It has no path, so there is nothing to answer or to close."""
    await world.create(b"x.pt")
    node = world.node(b"x.pt")
    await world.unlink(b"x.pt")
    with fails(errno.ENODATA):
        world.attributes.getxattr(node, "user.cachefs.socket")
    with fails(errno.EINVAL):
        await world.attributes.setxattr(node, "user.cachefs.close", b"1")


async def test_fsync_makes_the_name_durable_once_and_waits_for_the_journal(world):
    await world.mkdir(b"d")
    handle = await world.create(b"d/x.pt")
    node, directory = world.node(b"d/x.pt"), world.node(b"d")
    assert node.fresh
    assert directory.fresh
    await world.content.fsync(handle, data_only=True)
    assert not node.fresh
    assert not directory.fresh
    assert world.observer.durable_calls == 1
    await world.rename(b"d/x.pt", b"d/y.pt")
    assert node.fresh
    await world.content.fsync_directory(directory)
    assert world.observer.durable_calls == 2


async def test_no_room_is_enospc_and_leaves_no_file(world):
    world.observer.room = False
    for call in (world.create(b"x"), world.names.mknod(1, b"x", stat.S_IFREG | 0o644, 0, ME)):
        with fails(errno.ENOSPC):
            await call
    assert os.listdir(world.staging.tree) == []
    assert world.observer.told() == []


async def test_create_opens_a_file_that_somebody_else_made_unless_o_excl_is_given(world):
    await world.put(b"x", b"theirs")
    handle = await world.create(b"x")
    assert world.content.read(handle, 0, 10) == b"theirs"
    with fails(errno.EEXIST):
        await world.create(b"x", os.O_RDWR | os.O_EXCL)


async def test_a_listing_names_everything_once_whatever_happens_meanwhile(world):
    for number in range(100):
        await world.put(b"f%03d" % number, b"")
    listing = world.names.opendir(1)
    names = list(world.names.names(listing, 0))
    await world.unlink(b"f050")
    await world.put(b"late", b"")
    assert list(world.names.names(listing, names[39][1])) == names[40:]
    assert world.names.listed(listing, b"f050") is None
    assert world.names.listed(listing, b"f051") is not None
    again = list(world.names.names(listing, 0))
    assert sorted(name for name, _ in again) == sorted(map(os.fsencode, os.listdir(world.staging.tree)))
    # The kernel joins what it gets through several handles by the positions alone.
    assert not {position for _, position in names} & {position for _, position in again}
    # It lets a handle go on that has read nothing, when it has dropped a part of what it got before.
    other = world.names.opendir(1)
    after = again.index(next(one for one in again if one[0] == names[39][0]))
    assert [name for name, _ in world.names.names(other, names[39][1])] == [name for name, _ in again[after + 1 :]]
    world.names.releasedir(other)
    world.names.releasedir(listing)


async def test_names_of_one_hash_are_all_listed_wherever_a_reply_ends(world, monkeypatch):
    monkeypatch.setattr(namespace.xxhash, "xxh3_64_intdigest", lambda name: 7)
    for name in (b"a", b"b", b"c"):
        await world.put(name, b"")
    listing = world.names.opendir(1)
    seen, position = [], 0
    while found := next(world.names.names(listing, position), None):
        name, position = found
        seen.append(name)
    assert seen == [b"a", b"b", b"c"]


async def test_very_deep_directories_work(world):
    """Deeper than Python's own limit of nested calls."""
    chain = [world.table.root]
    for _ in range(1500):
        node, _ = await world.names.mkdir(chain[-1].id, b"d", 0o755, ME)
        chain.append(node)
    assert world.table.path_of(chain[-1]) == b"/".join([b"d"] * 1500)
    await world.rename(b"d", b"e")
    assert world.table.path_of(chain[-1]) == b"/".join([b"e"] + [b"d"] * 1499)
    for above, node in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        await world.names.rmdir(above.id, node.names[-1][1])
    assert os.listdir(world.staging.tree) == []


@pytest.mark.parametrize("exists", [False, True])
async def test_an_open_that_cannot_be_journaled_leaves_no_handle_behind(world, exists):
    """The kernel never releases what it did not get; the file would count as open for ever."""
    if exists:
        (world.staging.tree / "f").write_bytes(b"x")

    def refuse(change):
        world.observer.changes.append(change)
        if change.kind in (Kind.CREATED, Kind.TRUNCATED):
            raise StagingError("the journal is full")

    world.observer.after = refuse
    if exists:
        entry = world.names.entry(ROOT_ID, b"f")
        opening = world.content.open(entry[0].id, os.O_WRONLY | os.O_TRUNC)
    else:
        opening = world.content.create(ROOT_ID, b"f", 0o644, os.O_WRONLY, ME)
    with pytest.raises(StagingError):
        await opening
    assert len(world.tree.handles) == 0
    assert world.observer.told()[-1] == (Kind.CLOSED, b"f")


async def test_a_change_of_a_file_with_two_names_is_told_of_both(world):
    """The kernel does not say under which one it was opened, and a generation may hold only one of them."""
    await world.put(b"x.pt", b"x")
    await world.names.link(world.node(b"x.pt").id, 1, b"loose")
    world.observer.told()
    handle = await world.open(b"x.pt", os.O_WRONLY)
    assert world.observer.told() == [(Kind.OPENED, b"x.pt"), (Kind.OPENED, b"loose")]
    await world.content.release(handle)
    assert world.observer.told() == [(Kind.CLOSED, b"x.pt"), (Kind.CLOSED, b"loose")]
    world.observer.hold(b"x.pt")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.open, b"loose", os.O_WRONLY)
        await trio.testing.wait_all_tasks_blocked()
        assert (world.observer.waiting, world.observer.told()) == (1, [])
        world.observer.let_go(b"x.pt")
    assert world.observer.told() == [(Kind.OPENED, b"x.pt"), (Kind.OPENED, b"loose")]


async def written(world):
    await world.content.release(await world.open(b"x.pt", os.O_RDWR))


async def emptied(world):
    """Without a handle that could say so, it is finished at once."""
    await world.content.release(await world.open(b"x.pt", os.O_RDONLY | os.O_TRUNC))


async def made(world):
    await world.names.mknod(*world.walk(b"new"), stat.S_IFREG | 0o644, 0, ME)


async def exchanged(world):
    await world.rename(b"x.pt", b"other", flags=RENAME_EXCHANGE)


@pytest.mark.parametrize("failing", [True, False])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (written, [(kind, name) for kind in (Kind.OPENED, Kind.CLOSED) for name in (b"x.pt", b"y.pt")]),
        (emptied, [(kind, name) for kind in (Kind.TRUNCATED, Kind.CLOSED) for name in (b"x.pt", b"y.pt")]),
        (made, [(Kind.CREATED, b"new"), (Kind.CLOSED, b"new")]),
        (exchanged, [(Kind.RENAMED, b"other"), (Kind.RENAMED, b"x.pt")]),
    ],
)
async def test_all_of_a_change_is_told_and_waited_for_although_one_part_fails(world, change, told, failing):
    """A save would wait for ever for what it was not told, or what nobody carried out."""
    await world.put(b"x.pt", b"x")
    await world.names.link(world.node(b"x.pt").id, 1, b"y.pt")
    await world.put(b"other", b"x")
    world.observer.told()
    carried_out = []

    def after(change):
        async def wait():
            carried_out.append((change.kind, change.path))
            if failing and len(carried_out) == 1:
                raise StagingError("the journal is full")

        return wait()

    world.observer.after = after
    with pytest.raises(StagingError) if failing else nullcontext():
        await change(world)
    assert carried_out == told


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda world: world.mkdir(b"d/new"), [b"new"]),
        (lambda world: world.names.mknod(*world.walk(b"d/new"), stat.S_IFREG | 0o644, 0, ME), [b"new"]),
        (lambda world: world.names.symlink(*world.walk(b"d/new"), b"x.pt", ME), [b"new"]),
        (lambda world: world.names.link(world.node(b"d/x.pt").id, *world.walk(b"d/new")), [b"new"]),
        (lambda world: world.create(b"d/new"), [b"new"]),
        (lambda world: world.unlink(b"d/x.pt"), [b"x.pt"]),
        (lambda world: world.names.rmdir(*world.walk(b"d/sub")), [b"sub"]),
        (lambda world: world.rename(b"d/x.pt", b"d/new"), [b"x.pt", b"new"]),
        (lambda world: world.rename(b"d/x.pt", b"d/sub", flags=RENAME_EXCHANGE), [b"x.pt", b"sub"]),
    ],
)
async def test_the_kernel_asks_again_for_the_names_of_a_refused_change(world, change, names):
    """It was carried out all the same; and of what the kernel was not given no reference is left."""
    directory = await world.mkdir(b"d")
    await world.put(b"d/x.pt", b"x")
    await world.mkdir(b"d/sub")
    for name in (b"d/x.pt", b"d/sub"):
        world.node(name)
    changed = []
    world.tree.name_changed = changed.append
    after = world.observer.after

    def refuse(change):
        after(change)
        if change.kind is not Kind.CLOSED:
            raise StagingError("the journal is full")

    world.observer.after = refuse
    known = len(world.table)
    with pytest.raises(StagingError):
        await change(world)
    assert changed == [(directory.id, name) for name in names]
    assert len(world.table) == known
