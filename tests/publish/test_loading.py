"""loading.py: a real command on a real copy. These tests run real processes, so they keep the real clock."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from cachefs.errors import CachefsError, CorruptError, InvalidError
from cachefs.formats.codec import decode
from cachefs.formats.manifest import Loaded, Manifest
from cachefs.formats.manifest import TestEvidence as Evidence
from cachefs.formats.records import State
from cachefs.publish import loading
from cachefs.publish.loading import CHECKPOINT, TAIL, Load, configured, load, sweep
from cachefs.publish.writes import Writes
from cachefs.store.hop import Threads
from tests.publish.stage import FILES, RUN, TREE, Member, memory
from tests.store.faults import FaultyStore, Rule, ends, rules, throttled

ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="only root can change the user")
PATIENCE = 30.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="cachefs-load-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def published(members: Callable[..., Member]) -> tuple[Writes, Manifest]:
    """A published generation and what reads it."""
    member = members(FaultyStore(memory()))
    member.save("step-1", 1, **TREE)
    trio.run(member.publish)
    return Writes(member.store, member.keys, Threads(4)), member.manifest()


def how(place: Path, script: str, *, timeout: float = PATIENCE, reserve: int = 0) -> Load:
    """A Python program as the command; `COPY` in it is the path it is given."""
    program = f"import os, sys, time\nCOPY = sys.argv[1]\n{script}"
    made = configured("true", pwd.getpwuid(os.geteuid()).pw_name, timeout=timeout, root=place / "load")
    return msgspec.structs.replace(made, command=(sys.executable, "-c", program), reserve=reserve)


def loads(published: tuple[Writes, Manifest], way: Load) -> Loaded:
    writes, manifest = published
    return trio.run(partial(load, writes, manifest, way, workers=2, ranges=True))


def left(way: Load) -> list[Path]:
    return list(way.root.iterdir())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def await_gone(pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while not gone(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        os.sched_yield()


def test_the_command_sees_the_copy_as_it_was_saved(published, place):
    way = how(
        place,
        "assert COPY == os.environ['CACHEFS_CHECKPOINT'] == os.getcwd()\n"
        f"assert {{n: open(n, 'rb').read() for n in {list(FILES)}}} == {FILES!r}\n"
        "assert os.readlink('link') == 'model.bin' and open('../latest').read() == 'step-1\\n'\n"
        "assert os.stat('sub').st_mode & 0o777 == 0o700 and os.stat('..').st_mode & 0o777 == 0o700\n"
        "assert os.getsid(0) == os.getpgrp() == os.getpid() and sys.stdin.read() == ''\n"
        "open('sub/mine', 'w').write('the copy is its own')\n"
        "print('out', flush=True); print('err', file=sys.stderr)",
    )
    loaded = loads(published, way)
    assert loaded == Loaded(way.command, way.user, 0, "out\nerr\n", loaded.seconds)
    assert 0 < loaded.seconds < PATIENCE
    assert left(way) == []


def test_a_generation_of_one_file(members, place):
    member = members()
    member.save("model.pt", 1, {"model.pt": b"weights"}, kind="file")
    trio.run(member.publish)
    way = how(place, "assert open(COPY).read() == 'weights' and os.path.samefile(os.getcwd(), os.path.dirname(COPY))")
    loads((Writes(member.store, member.keys, Threads(4)), member.manifest()), way)


def test_the_environment_holds_nothing_else(published, place, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "CACHEFS_STORE", "PYTHONPATH", "LD_PRELOAD_NOT"):
        monkeypatch.setenv(name, "secret")
    loaded = loads(published, how(place, "print(sorted(set(os.environ) - {'LC_CTYPE'}), os.environ['HOME'])"))
    home = pwd.getpwuid(0).pw_dir if ROOT else os.environ["HOME"]
    assert loaded.output == f"{sorted(['PATH', 'HOME', 'LANG', CHECKPOINT])} {home}\n"


def test_signals_that_the_engine_ignores_work_in_the_command(published, place):
    for number in ("SIGTERM", "SIGINT"):
        with pytest.raises(CorruptError, match=f"ended with signal {number}|ended with status 1"):
            loads(published, how(place, f"import signal; os.kill(os.getpid(), signal.{number}); time.sleep(60)"))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('a\\nshape differs'); sys.exit(3)", r"ended with status 3; its output ends: a shape differs$"),
        ("os.kill(os.getpid(), 9)", r"ended with signal SIGKILL; its output ends: \(nothing\)$"),
        ("print('x' * 1000, 'the end'); sys.exit(1)", r"its output ends: x{392} the end$"),
    ],
)
def test_a_failure_names_command_status_and_the_end_of_the_output(published, place, script, message):
    way = how(place, script)
    with pytest.raises(CorruptError, match=message) as caught:
        loads(published, way)
    assert str(caught.value).startswith("load_command ")
    assert "\n" not in str(caught.value).split("its output ends")[1]
    assert left(way) == []


def test_the_end_of_a_long_output_is_kept(published, place):
    loaded = loads(published, how(place, "sys.stdout.write('\\N{EURO SIGN}' * 200_000 + 'the end')"))
    assert loaded.output.endswith("\N{EURO SIGN}the end")
    assert TAIL - 2 <= len(loaded.output.encode()) <= TAIL + 6  # a cut character becomes a mark
    assert len(loaded.output) < TAIL


FAMILY = """
import subprocess
def child(**how):
    return subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], **how).pid
"""


def test_a_timeout_ends_the_command_and_its_descendants(published, place):
    pids = place / "pids"
    way = how(
        place,
        f"{FAMILY}"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child()}} {{child(start_new_session=True)}}')\n"
        "print('loading', flush=True); time.sleep(600)",
        timeout=1.5,
    )
    with pytest.raises(CorruptError, match=r"did not end within 1.5 s; its output ends: loading$"):
        loads(published, way)
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 3
    for pid in found:
        await_gone(pid)
    assert left(way) == []


def test_descendants_that_outlive_the_command_are_ended(published, place):
    """They hold the pipe open, too: that must not make the test wait for them."""
    pids = place / "pids"
    script = f"{FAMILY}open({str(pids)!r}, 'w').write(f'{{child()}} {{child(start_new_session=True)}}')\nprint('done')"
    assert loads(published, how(place, script)).output == "done\n"
    for pid in pids.read_text().split():
        await_gone(int(pid))


def test_cancelling_ends_the_command_and_leaves_nothing(published, place):
    writes, manifest = published
    pipe = str(place / "pipe")
    os.mkfifo(pipe)
    way = how(place, f"print(os.getpid(), file=open({pipe!r}, 'w'), flush=True)\ntime.sleep(600)")

    async def main() -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(load, writes, manifest, way, workers=2, ranges=True))
            pid = await trio.to_thread.run_sync(Path(pipe).read_text)
            nursery.cancel_scope.cancel()
        return int(pid)

    assert gone(trio.run(main))
    assert left(way) == []


def test_cancelling_ends_the_restore(published, place):
    writes, manifest = published
    assert isinstance(writes.store, FaultyStore)
    writes.store.plan = rules(Rule("*", throttled, ends("model.bin"), nth=0))
    way = how(place, "pass")

    async def main() -> None:
        async def pause(error: CachefsError, retries: int) -> None:
            waits.set()
            await trio.sleep_forever()

        waits = trio.Event()
        slow = Writes(writes.store, writes.keys, Threads(4), pause)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(load, slow, manifest, way, workers=2, ranges=True))
            with trio.fail_after(PATIENCE):
                await waits.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert left(way) == []


def test_a_copy_waits_for_room_with_the_reserve(published, place):
    way = how(place, "pass", reserve=1 << 60)
    with pytest.raises(CachefsError, match="a copy to load does not fit") as caught:
        loads(published, way)
    assert not isinstance(caught.value, CorruptError)
    assert left(way) == []


def test_a_program_that_cannot_be_run_proves_nothing_about_the_checkpoint(published, place):
    way = msgspec.structs.replace(how(place, ""), command=(str(place / "absent"),))
    with pytest.raises(CachefsError, match=r"cannot be run as .*: No such file") as caught:
        loads(published, way)
    assert not isinstance(caught.value, CorruptError)
    assert left(way) == []


def as_nobody(place: Path, script: str) -> Load:
    """A shell script, run by a user who cannot run this interpreter where it lies in root's home."""
    made = configured("sh -ec", "nobody", timeout=PATIENCE, root=place / "load")
    return msgspec.structs.replace(made, command=(*made.command, script, "sh"))


@as_root
def test_the_command_runs_as_the_user_with_no_other_groups(published, place):
    entry = pwd.getpwnam("nobody")
    script = (
        'id -u; id -ru; id -G; echo "$HOME"; cat model.bin >&2; ls sub >&2\n'
        "stat -c %u . .. model.bin sub sub/small link ../latest ../newest | sort -u; rm model.bin"
    )
    loaded = loads(published, as_nobody(place, script))
    assert loaded.user == "nobody"
    files = FILES["model.bin"].decode() + "empty\nsmall\n"
    assert loaded.output == f"{entry.pw_uid}\n{entry.pw_uid}\n{entry.pw_gid}\n{entry.pw_dir}\n{files}{entry.pw_uid}\n"


@as_root
def test_what_the_user_did_to_the_copy_is_removed_and_nothing_else(published, place):
    victim = place / "victim"
    victim.mkdir(mode=0o755)
    (victim / "file").write_text("kept")
    way = as_nobody(place, f"rm -r sub; ln -s {victim} sub; ln -s {victim} model; chmod 0 .. .")
    loads(published, way)
    assert left(way) == []
    assert (victim / "file").read_text() == "kept"
    assert (victim.stat().st_mode & 0o777, victim.stat().st_uid) == (0o755, 0)


def test_what_a_killed_engine_left_is_ended_and_removed(place):
    copy = place / "load" / ("a" * 32) / "step-1"
    (copy / "sub").mkdir(parents=True)
    (copy / "sub").chmod(0o500)
    running = subprocess.Popen(["sleep", "600"], env={CHECKPOINT: str(copy)}, cwd=copy, start_new_session=True)
    other = subprocess.Popen(
        ["sleep", "600"], env={CHECKPOINT: str(place / "loader" / "x"), "X": f"{CHECKPOINT}={copy}"}
    )
    try:
        sweep(place / "load")
        assert running.wait(PATIENCE) == -signal.SIGKILL
        assert other.poll() is None
        assert list((place / "load").iterdir()) == []
    finally:
        other.kill()
        other.wait()
    sweep(place / "absent")


# Within a publication.


def publication(members: Callable[..., Member], way: Load, **settings: Any) -> tuple[Member, str]:
    member = members()
    attempt = member.save("step-1", 1)
    trio.run(partial(member.publish, load=way, **settings))
    return member, attempt


def test_the_evidence_says_what_the_command_said(members, place):
    member, attempt = publication(members, how(place, "print('loss 0.5')"))
    assert member.attempt(attempt).state is State.PUBLISHED
    key = member.keys.test(RUN, attempt, opened=1, sealed=1)
    found = member.inner.get(key)
    assert found is not None
    evidence = decode(found[1], Evidence, key)
    assert evidence.loaded is not None
    assert (evidence.level, evidence.loaded.status, evidence.loaded.output) == ("load", 0, "loss 0.5\n")


def test_what_does_not_load_is_not_published(members, place, declared_warnings):
    declared_warnings("generation abandoned")
    member, attempt = publication(members, how(place, "print('bad tensor'); sys.exit(1)"))
    record = member.attempt(attempt)
    assert record.state is State.ABANDONED
    assert "restore test: load_command" in record.error
    assert "ended with status 1; its output ends: bad tensor" in record.error
    assert member.generations() == []
    assert member.inner.get(member.keys.test(RUN, attempt, opened=1, sealed=1)) is None


# Settings.


def test_settings():
    if ROOT:
        made = configured("true --fast 'a b'", "nobody", timeout=5, root=Path("/load"))
        assert (made.command, made.user) == (("true", "--fast", "a b"), "nobody")
        assert made.switch == loading.Switch(pwd.getpwnam("nobody").pw_uid, pwd.getpwnam("nobody").pw_gid)
        assert configured("true", "root", timeout=5, root=Path("/load")).switch == loading.Switch(0, 0)
    else:
        assert configured("true", None, timeout=5, root=Path("/load")).switch is None


REFUSED = [
    (None, "nobody", "load_command is not set"),
    (" ", "nobody", "load_command is not set"),
    ("'unclosed", "nobody", "load_command cannot be split into words: No closing quotation"),
    ("no-such-program-here", "nobody", "load_command: no-such-program-here is not a program"),
    pytest.param("true", None, "the daemon runs as root, but load_user is not set", marks=as_root),
    pytest.param("true", "no-such-user", "there is no user 'no-such-user'", marks=as_root),
]


@pytest.mark.parametrize(("command", "user", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(command, user, message):
    with pytest.raises(InvalidError, match=message) as caught:
        configured(command, user, timeout=5, root=Path("/load"))
    assert caught.value.hint


def test_capabilities_that_are_missing_are_named():
    assert loading._lacking("Name:\tx\nCapEff:\t00000000000000df\n") == "CAP_KILL"
    assert loading._lacking("CapEff:\t000001ffffffffff\n") == ""
    assert loading._lacking("CapEff:\t0000000000000000\n") == "CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID"


def test_shutil_knows_what_this_file_relies_on():
    assert shutil.rmtree.avoids_symlink_attacks
