"""What only a directory has to prove: plain files, two processes, and death at any moment."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import signal
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import (
    ConditionFailed,
    CorruptError,
    DeniedError,
    InvalidError,
    NoStoreError,
    UnavailableError,
    Unsupported,
)
from cachefs.store import directory, filerecords, files, fileuploads
from cachefs.store.base import CREATE_ONLY, Condition, PartInfo
from cachefs.store.directory import DirectoryStore
from cachefs.store.filekeys import COMPONENT_MAX, extend, is_versions, key_bytes, versions_path
from cachefs.store.files import store_error

processes = multiprocessing.get_context("fork")


def sha(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


@pytest.fixture
def store(tmp_path) -> DirectoryStore:
    made = DirectoryStore(str(tmp_path))
    made.prepare()
    return made


def files_below(root: Path) -> set[str]:
    """Every file but the lock files, relative to the root."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {path for path in found if not path.startswith(".cachefs/locks/")}


def test_versions_are_plain_files(store, tmp_path):
    info = store.put("runs/r/a.bin", b"hello", condition=CREATE_ONLY, sha256=sha(b"hello"), metadata={"W": "1"})
    home = tmp_path / "runs/r/a.bin@"
    assert (home / info.version_id).read_bytes() == b"hello"
    assert stat.S_IMODE((home / info.version_id).stat().st_mode) & 0o222 == 0
    record = msgspec.json.decode((home / "00000001.json").read_bytes())
    assert record == {
        "key": "runs/r/a.bin",
        "version_id": info.version_id,
        "size": 5,
        "sha256": hashlib.sha256(b"hello").hexdigest(),
        "metadata": {"w": "1"},
        "marker": False,
    }
    assert files_below(tmp_path) == {f"runs/r/a.bin@/{info.version_id}", "runs/r/a.bin@/00000001.json"}


def test_deleting_leaves_no_empty_directories(store, tmp_path):
    kept = store.put("runs/r/kept", b"1", condition=None)
    gone = store.put("runs/r/deep/er/gone", b"1", condition=None)
    store.delete_version("runs/r/deep/er/gone", gone.version_id)
    assert sorted(os.listdir(tmp_path / "runs/r")) == ["kept@"]
    store.delete_version("runs/r/kept", kept.version_id)
    assert os.listdir(tmp_path) == [".cachefs"]


def test_etags_never_repeat(store):
    first = store.put("pointer", b"same", condition=CREATE_ONLY)
    second = store.put("pointer", b"other", condition=Condition(if_match=first.etag))
    third = store.put("pointer", b"same", condition=Condition(if_match=second.etag))
    assert len({first.etag, second.etag, third.etag}) == 3
    with pytest.raises(ConditionFailed):
        store.put("pointer", b"x", condition=Condition(if_match=first.etag))


def test_a_missing_root_is_not_an_empty_store(tmp_path):
    _all_raise_no_store(DirectoryStore(str(tmp_path / "not-mounted")))
    assert not (tmp_path / "not-mounted").exists()


def _all_raise_no_store(store: DirectoryStore) -> None:
    for act in (
        store.check,
        lambda: store.put("a", b"", condition=None),
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.list(""),
        lambda: list(store.list_versions("")),
        lambda: store.list_multiparts(""),
        lambda: store.create_multipart("a"),
        lambda: store.delete_version("a", "00000001-000000000000"),
        lambda: store.get_range("a", "00000001-000000000000", 0, 1),
    ):
        with pytest.raises(NoStoreError):
            act()


@pytest.mark.parametrize("prepared", ["before", "here"])
def test_the_empty_mountpoint_of_a_store_is_not_an_empty_store(tmp_path, prepared):
    """An unmounted file system leaves one. Nothing is written to it, and nothing is taken for deleted."""
    root, away = tmp_path / "store", tmp_path / "away"
    root.mkdir()
    if prepared == "before":
        DirectoryStore(str(root)).prepare()
    store = DirectoryStore(str(root))
    if prepared == "here":
        store.prepare()
    there = store.put("a", b"x", condition=None)
    root.rename(away)
    root.mkdir()
    _all_raise_no_store(store)
    assert os.listdir(root) == []
    root.rmdir()
    away.rename(root)
    assert store.head("a") == there


@pytest.mark.parametrize("look", ["list", "list_versions"])
def test_a_store_that_goes_away_in_the_middle_of_a_listing_gives_no_short_one(tmp_path, monkeypatch, look):
    root = tmp_path / "store"
    root.mkdir()
    store = DirectoryStore(str(root))
    for key in ("a", "b/c"):
        store.put(key, b"x", condition=None)
    found = os.listdir

    def listdir(path):
        names = found(path)
        if path == str(root):
            root.rename(tmp_path / "away")
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(NoStoreError):
        list(getattr(store, look)(""))


def test_a_check_changes_nothing(tmp_path):
    """A directory given by mistake stays what it was, and a store can be read by who may not write."""
    store = DirectoryStore(str(tmp_path))
    store.check()
    assert store.list("runs/").keys == ()
    assert os.listdir(tmp_path) == []
    store.prepare()
    assert os.listdir(tmp_path) == [".cachefs"]


def test_a_refused_path_is_named():
    error = store_error(PermissionError(errno.EACCES, "x", "/dir/runs/r"), "file:///dir")
    assert str(error) == "file:///dir: Permission denied: /dir/runs/r"


def test_bytes_that_shrank_are_noticed(store, tmp_path):
    info = store.put("a", b"0123456789", condition=None)
    path = tmp_path / "a@" / info.version_id
    os.chmod(path, 0o600)
    os.truncate(path, 4)
    reads = (
        lambda: store.get("a"),
        lambda: list(store.get_stream("a", info.version_id)),
        lambda: store.get_range("a", info.version_id, 0, 2),
        lambda: store.head("a"),
    )
    for read in reads:
        with pytest.raises(CorruptError, match="has 4 bytes, not 10"):
            read()
    path.unlink()
    for read in reads:
        with pytest.raises(CorruptError, match="has lost its bytes"):
            read()


def test_a_store_that_goes_away_while_it_is_looked_at_has_lost_nothing(store, tmp_path, monkeypatch):
    """As when it is unmounted: between record and bytes, and between both and the read."""
    info = store.put("a", b"0123456789", condition=None)
    away = tmp_path.with_name("away")

    def goes_away(name, owner):
        found = getattr(owner, name)

        def called(*arguments):
            answer = found(*arguments)
            tmp_path.rename(away)
            monkeypatch.undo()
            return answer

        monkeypatch.setattr(owner, name, called)

    for name, owner, reads in (
        ("find", directory, (lambda: store.head("a", info.version_id), lambda: store.get("a", info.version_id))),
        ("find", directory, (lambda: store.get_range("a", info.version_id, 0, 2),)),
        ("head", store, (lambda: store.get_range("a", info.version_id, 0, 2),)),
        ("head", store, (lambda: list(store.get_stream("a", info.version_id)),)),
    ):
        for read in reads:
            goes_away(name, owner)
            with pytest.raises(NoStoreError):
                read()
            away.rename(tmp_path)


def test_bytes_that_are_lost_between_the_look_and_the_read_are_noticed(store, tmp_path, monkeypatch):
    info = store.put("a", b"0123456789", condition=None)
    head = store.head

    def lost(*arguments):
        found = head(*arguments)
        (tmp_path / "a@" / info.version_id).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(store, "head", lost)
    with pytest.raises(CorruptError, match="has lost its bytes"):
        store.get_range("a", info.version_id, 0, 2)


def test_a_version_that_is_deleted_while_it_is_looked_at_is_gone(store, monkeypatch):
    info = store.put("a", b"0123456789", condition=None)

    def deleted(*arguments):
        record = filerecords.find(*arguments)
        monkeypatch.undo()
        store.delete_version("a", info.version_id)
        return record

    monkeypatch.setattr(directory, "find", deleted)
    assert store.head("a", info.version_id) is None


def test_a_damaged_record_is_noticed(store, tmp_path):
    store.put("a", b"1", condition=None)
    record = tmp_path / "a@/00000001.json"
    os.chmod(record, 0o600)
    record.write_bytes(b"{")
    with pytest.raises(CorruptError):
        store.head("a")


@pytest.mark.parametrize("version_id", ["", "x", "../../etc/passwd", "00000001", "00000001-000000000000", "1-abc"])
def test_foreign_version_ids(store, version_id):
    store.put("a", b"1", condition=None)
    assert store.head("a", version_id) is None
    store.delete_version("a", version_id)
    assert store.get("a")


@pytest.mark.parametrize("upload_id", ["", "..", "../new", "0" * 32])
def test_foreign_upload_ids(store, upload_id, tmp_path):
    store.put("a", b"1", condition=None)
    store.abort_multipart("a", upload_id)
    assert (tmp_path / ".cachefs/uploads").exists()
    assert store.get("a")


def refuse(*_):
    raise OSError(errno.EXDEV, "cross-device")


def end_early(*_):
    return 0


@pytest.mark.parametrize("kernel", [refuse, end_early])
def test_copying_parts_without_the_kernels_help(store, monkeypatch, kernel):
    monkeypatch.setattr(os, "copy_file_range", kernel)
    upload_id = store.create_multipart("m")
    bodies = [bytes([n]) * 100_000 for n in range(3)]
    parts = [
        PartInfo(n, store.upload_part("m", upload_id, n, body, sha256=sha(body)), len(body), sha(body))
        for n, body in enumerate(bodies, 1)
    ]
    info = store.complete_multipart("m", upload_id, parts, condition=CREATE_ONLY)
    assert b"".join(store.get_stream("m", info.version_id)) == b"".join(bodies)


def test_a_short_copy_is_not_committed(store, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", end_early)
    monkeypatch.setattr(os, "sendfile", end_early)
    upload_id = store.create_multipart("m")
    parts = [PartInfo(1, store.upload_part("m", upload_id, 1, b"body", sha256=sha(b"body")), 4, sha(b"body"))]
    with pytest.raises(UnavailableError):
        store.complete_multipart("m", upload_id, parts, condition=CREATE_ONLY)
    assert store.head("m") is None
    assert store.list_parts("m", upload_id) == parts


@pytest.mark.parametrize(
    ("number", "expected", "reason"),
    [
        (2, NoStoreError, ""),
        (13, DeniedError, ""),
        (30, DeniedError, ""),
        (28, UnavailableError, "full"),
        (122, UnavailableError, "full"),
        (5, UnavailableError, "io"),
        (116, UnavailableError, "stale"),
        (37, Unsupported, ""),
    ],
)
def test_errors_of_the_file_system(number, expected, reason):
    error = store_error(OSError(number, "x"), "file:///dir")
    assert type(error) is expected
    assert getattr(error, "reason", "") == reason


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=700))
def test_keys_are_paths_reversibly(key):
    path = versions_path(key)
    names = path.split("/")
    assert all(0 < len(os.fsencode(name)) <= 255 and not name.startswith(".") and "\0" not in name for name in names)
    assert [is_versions(name) for name in names] == [False] * (len(names) - 1) + [True]
    raw = b""
    for name in names:
        raw = extend(raw, name)
    assert key_bytes(raw) == key.encode()


@given(
    st.lists(st.sampled_from(["a", "a@", ".", "..", "", "%", "%_", "%+", "x" * COMPONENT_MAX]), min_size=1, max_size=4)
)
def test_different_keys_have_different_paths(components):
    key = "/".join(components)
    if key:
        assert versions_path(key + "/") != versions_path(key) != versions_path("/" + key)


def test_keys_that_are_none(store):
    for key in ("", "\udc80"):
        with pytest.raises(InvalidError):
            store.put(key, b"", condition=None)


# two processes


def _write(root: str, key: str, rounds: int, number: int, swap: bool, barrier, results) -> None:
    store = DirectoryStore(root)
    won = []
    for turn in range(rounds):
        name = f"{key}/{turn:03d}"
        condition = Condition(if_match=store.head(name).etag) if swap else CREATE_ONLY
        barrier.wait(30)
        try:
            won.append(store.put(name, f"{number}".encode(), condition=condition).version_id)
        except ConditionFailed:
            won.append("")
    results.put((number, won))


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-shared-locks"])
@pytest.mark.parametrize("swap", [False, True], ids=["create", "swap"])
def test_processes_race(store, tmp_path, swap, locks, monkeypatch):
    """With locks, and on a file system where each node has its own: link(2) alone must decide then."""
    if not locks:
        monkeypatch.setattr(files.fcntl, "fcntl", lambda *_: 0)
    writers, rounds = 3, 30
    if swap:
        for turn in range(rounds):
            store.put(f"k/{turn:03d}", b"start", condition=CREATE_ONLY)
    barrier, results = processes.Barrier(writers), processes.Queue()
    started = [
        processes.Process(target=_write, args=(str(tmp_path), "k", rounds, number, swap, barrier, results))
        for number in range(writers)
    ]
    for process in started:
        process.start()
    won = dict(results.get(timeout=60) for _ in started)
    for process in started:
        process.join()
        assert process.exitcode == 0
    for turn in range(rounds):
        winners = [number for number in range(writers) if won[number][turn]]
        assert len(winners) == 1, turn
        info, body = store.get(f"k/{turn:03d}")
        assert body == str(winners[0]).encode()
        assert info.version_id == won[winners[0]][turn]
        assert len(list(store.list_versions(f"k/{turn:03d}"))) == (2 if swap else 1)
    assert len([name for name in files_below(tmp_path) if not name.endswith(".json")]) == rounds * (2 if swap else 1)


def _count(root: str, turns: int) -> None:
    store = DirectoryStore(root)
    for _ in range(turns):
        while True:
            info, body = store.get("counter")
            try:
                store.put("counter", str(int(body) + 1).encode(), condition=Condition(if_match=info.etag))
                break
            except ConditionFailed:
                continue


def test_no_increment_is_lost(store, tmp_path):
    store.put("counter", b"0", condition=CREATE_ONLY)
    started = [processes.Process(target=_count, args=(str(tmp_path), 40)) for _ in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    assert store.get("counter")[1] == b"80"
    assert len(list(store.list_versions("counter"))) == 81


# death at any moment

STEPS = ("link", "rename", "unlink", "rmdir", "mkdir", "fsync", "write")
"""System calls that change or order the directory; the process is killed before and after each of them in turn."""


def _die_at(step: int, before: bool) -> None:
    """Make this process kill itself at its `step`-th change of the file system."""
    left = [step]

    def wrap(call):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))


def _killed(act, step: int, before: bool) -> bool:
    """Run `act` in a process that dies at `step`; return whether it lived to the end."""

    def run() -> None:
        _die_at(step, before)
        act()
        os._exit(0)  # so that nothing of pytest runs

    process = processes.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def _every_death(act_of, check_of, tmp_path) -> int:
    """Kill `act` at every step, each time in a fresh store; return how many deaths there were."""
    deaths = 0
    for before in (True, False):
        for step in range(1, 200):
            root = tmp_path / f"{before}-{step}"
            root.mkdir()
            store = DirectoryStore(str(root))
            store.prepare()
            act = act_of(store)
            lived = _killed(act, step, before)
            store.sweep(age=-1.0)
            check_of(store, root)
            if lived:
                break
            deaths += 1
        else:
            raise AssertionError("the operation never came to its end")
    return deaths


def _whole_or_nothing(store: DirectoryStore, key: str, bodies: list[bytes]) -> list[bytes]:
    """Check that every version is one of `bodies`, and return them, newest first."""
    found = [b"".join(store.get_stream(key, v.version_id)) for v in store.list_versions(key)]
    assert all(body in bodies for body in found)
    for version in store.list_versions(key):
        head = store.head(key, version.version_id)
        assert head.size == version.size
    return found


def test_killed_while_creating(tmp_path):
    def check(store, root):
        found = _whole_or_nothing(store, "runs/r/a", [b"body"])
        expected = {f"runs/r/a@/{v.version_id}" for v in store.list_versions("")}
        assert files_below(root) == expected | {"runs/r/a@/00000001.json" for _ in found}
        if found:
            with pytest.raises(ConditionFailed):
                store.put("runs/r/a", b"again", condition=CREATE_ONLY)
        else:
            store.put("runs/r/a", b"again", condition=CREATE_ONLY)

    deaths = _every_death(lambda s: lambda: s.put("runs/r/a", b"body", condition=CREATE_ONLY), check, tmp_path)
    assert deaths > 20


def test_killed_while_swapping(tmp_path):
    def act_of(store):
        first = store.put("p", b"old", condition=CREATE_ONLY)
        return lambda: store.put("p", b"new", condition=Condition(if_match=first.etag))

    def check(store, root):
        found = _whole_or_nothing(store, "p", [b"old", b"new"])
        assert found in ([b"old"], [b"new", b"old"])
        assert store.get("p")[1] == found[0]
        assert len(files_below(root)) == 2 * len(found)

    assert _every_death(act_of, check, tmp_path) > 15


def test_killed_while_deleting(tmp_path):
    def act_of(store):
        info = store.put("d/x", b"body", condition=CREATE_ONLY)
        store.put("d/y", b"stays", condition=CREATE_ONLY)
        return lambda: store.delete_version("d/x", info.version_id)

    def check(store, root):
        found = _whole_or_nothing(store, "d/x", [b"body"])
        assert store.get("d/y")[1] == b"stays"
        assert len(files_below(root)) == 2 * (len(found) + 1)

    assert _every_death(act_of, check, tmp_path) > 6


def test_killed_during_a_multipart_upload(tmp_path):
    bodies = [b"first part", b"second"]

    def act_of(store):
        def act():
            upload_id = store.create_multipart("m")
            parts = [
                PartInfo(n, store.upload_part("m", upload_id, n, body, sha256=sha(body)), len(body), sha(body))
                for n, body in enumerate(bodies, 1)
            ]
            store.complete_multipart("m", upload_id, parts, condition=CREATE_ONLY)

        return act

    def check(store, root):
        found = _whole_or_nothing(store, "m", [b"".join(bodies)])
        for upload in store.list_multiparts(""):
            for part in store.list_parts("m", upload.upload_id):
                assert part.sha256 == sha(bodies[part.number - 1])
            store.abort_multipart("m", upload.upload_id)
        assert store.list_multiparts("") == []
        assert len(files_below(root)) == 2 * len(found)

    assert _every_death(act_of, check, tmp_path) > 40


def test_the_sweep_spares_what_is_in_the_making(store, tmp_path):
    work = tmp_path / ".cachefs/new/other"
    work.mkdir()
    (work / "body").write_bytes(b"being written")
    assert store.sweep() == 0
    assert (work / "body").exists()
    os.utime(work, (1, 1))
    assert store.sweep() == 1
    assert not work.exists()


def test_every_step_is_under_test():
    """The modules call these functions through `os`, so the deaths above really happen between them."""
    for module in (directory, filerecords, files, fileuploads):
        assert module.os is os
