"""The command line against a running daemon, and against the store alone."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cachefs import __version__
from cachefs.cli.main import app
from cachefs.status import Status
from integration.node import CACHEFS, PATIENCE, Node, await_condition, node
from integration.posix import put
from integration.test_posix import as_user
from integration.world import assert_same, await_state, save, states, tensors

pytestmark = [pytest.mark.mount, pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Node]:
    """A node on a directory store, for all tests of the module; each writes to a run of its own."""
    root = tmp_path_factory.mktemp("commands")
    (root / "store").mkdir()
    with node(root, f"file://{root}/store") as one:
        yield one


@pytest.fixture
def run(request) -> str:
    """A name for the run of a test; it holds what looks like markup and a blank."""
    return f"run [bold] {request.node.name.split('[')[0][5:40]}"


def files(seed: int) -> dict[str, bytes]:
    return {"model-1.safetensors": tensors(1000, seed), "deep/model-2.safetensors": tensors(10, seed)}


def put_all(directory: Path, data: dict[str, bytes]) -> None:
    """Write a directory of files."""
    directory.mkdir(parents=True)
    for name, content in data.items():
        put(directory / name, content)


@pytest.fixture
def published(served, run) -> dict[int, dict[str, bytes]]:
    """Two published generations of the run, by step."""
    saved = {step: save(served.mnt / run / f"step-{step}", files(step)) for step in (1, 2)}
    for step in saved:
        await_state(served, f"{run}/step-{step}")
    return saved


def from_store(one: Node, command: str, *arguments: str | Path, code: int = 0) -> str:
    """Run a command that needs the store alone; return what it printed."""
    done = one.run(command, *arguments, "--store", one.store, check=False)
    assert done.returncode == code, done.stderr
    check_message(done, code)
    return done.stdout if code == 0 else done.stderr


def check_message(done: subprocess.CompletedProcess[str], code: int) -> None:
    """An error is one line, perhaps with a hint below it."""
    assert "Traceback" not in done.stderr
    if code not in (0, 2):
        first, *hints = done.stderr.splitlines()
        assert first.startswith("cachefs: ")
        assert len(hints) <= 1
        assert all(hint.startswith("         ") for hint in hints)


def failing(one: Node, *arguments: str | Path, code: int) -> str:
    """Run a command that must fail so; return its message."""
    done = one.run(*arguments, check=False)
    assert done.returncode == code, (done.returncode, done.stderr)
    check_message(done, code)
    return done.stderr


def contents(directory: Path) -> dict[str, bytes]:
    found = (Path(root) / name for root, _, names in os.walk(directory) for name in names)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


# ---- the program itself


def test_version_and_help():
    """On stdout, exit code 0; a wrong command line is a usage error with exit code 2 and no traceback."""
    version = subprocess.run([*CACHEFS, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"cachefs {__version__}\n"
    wrong = subprocess.run([*CACHEFS, "wait", "x", "--timeout", "soon"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
    runner = CliRunner()
    commands = re.findall(r"^  (\w+)  ", runner.invoke(app, "--help").stdout, re.MULTILINE)
    assert {"mount", "status", "wait", "ls", "close", "flush", "verify", "restore", "doctor"} <= set(commands)
    for command in commands:
        assert runner.invoke(app, [command, "--help"]).stdout.startswith("Usage: ")
    for arguments in ([], ["bogus"], ["wait"], ["status", "--bogus"]):
        assert runner.invoke(app, arguments).exit_code == 2, arguments


# ---- asking the daemon


def test_status_for_people(served, run, published):
    """One line for each generation, names as they are, whole lines also in a pipe."""
    text = served.run("status", served.mnt / run).stdout
    assert f"{served.mnt}  (pid {served.process.pid}" in text
    assert re.search(rf"^store +{re.escape(served.store)}  \(ok\)", text, re.MULTILINE)
    for step in published:
        assert re.search(rf"^{re.escape(run)}/step-{step} +{step} +published", text, re.MULTILINE)


def test_status_for_programs(served, run, published):
    """JSON of the documented fields and types."""
    status = msgspec.json.decode(served.run("status", "--json", served.mnt).stdout, type=Status)
    assert (status.pid, status.mountpoint, status.publishing_blocked) == (served.process.pid, str(served.mnt), "")
    found = [one for one in status.generations if one.run == run]
    assert [(one.generation, one.state, one.files, one.files_flushed) for one in found] == [
        ("step-1", "published", 3, 3),
        ("step-2", "published", 3, 3),
    ]
    assert [one.bytes for one in found] == [sum(map(len, saved.values())) for saved in published.values()]


def test_status_watch_goes_on_until_it_is_interrupted(served, run):
    """On a terminal: it shows what happens meanwhile, and Ctrl-C ends it without a traceback."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 200, 0, 0))
    process = subprocess.Popen(
        [*CACHEFS, "status", "--watch", served.mnt], stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    os.close(end)
    shown = ""

    def shows(text: str) -> bool:
        nonlocal shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
        return text in shown

    try:
        await_condition(lambda: shows("backlog"), "the status is shown")
        (served.mnt / run).mkdir()
        put(served.mnt / run / "watched.pt", b"x")
        await_condition(lambda: shows("watched.pt"), "the new save is shown")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert "Traceback" not in shown


def test_commands_find_the_mount(served, run, published, tmp_path):
    """By a path in it, by the current directory, by the environment, and through links from elsewhere."""
    (tmp_path / "link").symlink_to(served.mnt / run)
    (served.mnt / run / "latest").symlink_to("step-2")
    inside = subprocess.run(
        [*CACHEFS, "status", "--json"], cwd=served.mnt / run, capture_output=True, text=True, check=True
    )
    environ = {**os.environ, "CACHEFS_MOUNTPOINT": str(served.mnt)}
    outside = subprocess.run(
        [*CACHEFS, "status", "--json"], cwd="/", env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(inside.stdout)["pid"] == json.loads(outside.stdout)["pid"] == served.process.pid
    assert served.run("wait", tmp_path / "link/step-1").stdout == f"{run}/step-1: published\n"
    assert served.run("wait", tmp_path / "link/latest").stdout == f"{run}/step-2: published\n"
    assert "is not in a cachefs mount" in failing(served, "status", tmp_path, code=66)


def test_wait_returns_when_a_state_is_reached(served, run):
    """A later state will do; files in the generation stand for it; it may have been removed by then."""
    save(served.mnt / run / "step-1", files(1))
    for state in ("staged", "sealed", "published", "open"):
        done = served.run("wait", served.mnt / run / "step-1", "--state", state, "--json")
        answer = json.loads(done.stdout)
        assert answer["path"] == f"{run}/step-1"
        assert answer["state"] in ("staged", "flushed", "sealed", "tested", "published")
    assert "published" in served.run("wait", served.mnt / run / "step-1/model-1.safetensors").stdout
    shutil.rmtree(served.mnt / run / "step-1")
    assert served.run("wait", served.mnt / run / "step-1").stdout == f"{run}/step-1: published\n"


def test_wait_for_a_save_that_rotation_has_removed_already(served, run):
    """rmtree right after the close: the bytes are pinned, and the wait ends as if nothing had been."""
    save(served.mnt / run / "step-1", files(1))
    await_condition(lambda: states(served, f"{run}/step-1")[-1:] != ["open"], "the save is closed")
    shutil.rmtree(served.mnt / run)
    assert served.run("wait", served.mnt / run / "step-1").stdout == f"{run}/step-1: published\n"


def test_wait_that_cannot_end_well(served, run):
    """Timeout 124, a path nobody knows 66, the mount itself and an unknown state 2, an abandoned save 1."""
    (served.mnt / run / "step-1").mkdir(parents=True)
    put(served.mnt / run / "step-1/x.bin", b"x")
    before = time.monotonic()
    said = failing(served, "wait", served.mnt / run / "step-1", "--timeout", "0.3", code=124)
    assert 0.3 <= time.monotonic() - before < 20
    assert "is open and not published yet" in said
    assert "waiting: " in said
    assert "not part of a generation" in failing(served, "wait", served.mnt / run / "nothing", code=66)
    assert "mountpoint itself" in failing(served, "wait", served.mnt, code=2)
    assert "unknown state 'done'" in failing(served, "wait", served.mnt / run, "--state", "done", code=2)
    shutil.rmtree(served.mnt / run / "step-1")
    assert "abandoned: removed before it was complete" in failing(served, "wait", served.mnt / run / "step-1", code=1)


def test_wait_says_so_when_the_daemon_stops_meanwhile(tmp_path):
    (tmp_path / "store").mkdir()
    with node(tmp_path, f"file://{tmp_path}/store") as one:
        (one.mnt / "step-1").mkdir()
        put(one.mnt / "step-1/x.bin", b"x")
        waiting = subprocess.Popen([*CACHEFS, "wait", one.mnt / "step-1"], stderr=subprocess.PIPE, text=True)
        connected = f"{one.staging}/control.sock"
        await_condition(
            lambda: Path("/proc/net/unix").read_text().count(connected) > 1, "the command waits for the daemon"
        )
        assert one.stop() == 0
        _, said = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 69
    assert said.endswith("cachefs: the daemon stopped before it answered\n")


def test_close_by_hand(served, run):
    """For a directory that no preset knows: what is in it then is published. After a change it is a new attempt."""
    path = served.mnt / run / "mine"
    path.mkdir(parents=True)
    put(path / "weights", b"first")
    put(path / "more", b"x")
    first = json.loads(served.run("close", path, "--json").stdout)
    assert (first["path"], len(first["attempt"])) == (f"{run}/mine", 32)
    await_state(served, f"{run}/mine")
    assert json.loads(served.run("close", path, "--json").stdout) == first
    put(path / "weights", b"second")
    assert f"{run}/mine: closed (attempt " in served.run("close", path).stdout
    await_condition(lambda: states(served, f"{run}/mine") == ["published", "published"], "both are published")
    target = served.root / "closed"
    from_store(served, "restore", run, target)
    assert contents(target / "mine") == {"weights": b"second", "more": b"x"}


def test_close_by_hand_that_is_refused(served, run):
    """What does not exist 66; the mountpoint, what lies in a generation or around one, and what is empty 2."""
    path = served.mnt / run / "mine"
    path.mkdir(parents=True)
    put(path / "weights", b"x")
    served.run("close", path)
    assert "does not exist" in failing(served, "close", served.mnt / run / "nothing", code=66)
    assert "mountpoint itself" in failing(served, "close", served.mnt, code=2)
    said = failing(served, "close", path / "weights", code=2)
    assert f"{run}/mine/weights is not a generation: it lies inside another one" in said
    assert f"close {run}/mine" in said
    said = failing(served, "close", served.mnt / run, code=2)
    assert f"{run} is not a generation: it holds others" in said
    assert "close one of those" in said
    (served.mnt / run / "empty").mkdir()
    assert f"{run}/empty holds no bytes" in failing(served, "close", served.mnt / run / "empty", code=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_only_the_owner_and_root_may_close(served, run):
    """Anybody who reaches the mount may ask; the control socket knows who is at the other end."""
    from cachefs import control

    path = served.mnt / run / "mine"
    path.mkdir(parents=True)
    put(path / "weights", b"x")
    socket_path, _ = control.find(path)
    here = f"{run}/mine"

    def ask() -> Any:
        # The staging directory lies below a private one here; from inside it is reached all the same.
        status = control.ask(Path("control.sock"), control.StatusRequest())
        try:
            return [status["pid"], control.ask(Path("control.sock"), control.CloseRequest(here))]
        except control.DaemonError as error:
            return [status["pid"], error.exit_code, str(error)]

    pid = served.process.pid
    assert as_user(1234, socket_path.parent, ask) == [pid, 77, f"only its owner or root may close {here}"]
    os.chown(path, 1234, 1234)
    answer = as_user(1234, socket_path.parent, ask)
    assert (answer[0], len(answer[1])) == (pid, 32)


def test_flush_returns_when_nothing_is_pending(served, run):
    for step in range(3):
        save(served.mnt / run / f"step-{step}", files(step))
        await_condition(lambda step=step: states(served, f"{run}/step-{step}") != ["open"], "it is closed")
    answer = json.loads(served.run("flush", served.mnt, "--json").stdout)
    assert answer["published"] >= 3
    assert [states(served, f"{run}/step-{step}") for step in range(3)] == [["published"]] * 3
    assert "nothing is pending" in served.run("flush", served.mnt).stdout


def test_flush_waits_for_a_complete_save_and_names_the_others(served, run):
    """The Trainer's save is complete, and quiet must follow; of the other one nobody has said that it is complete."""
    put_all(served.mnt / run / "step_7", {"notes.txt": b"x"})
    put_all(served.mnt / run / "checkpoint-20", {"model.safetensors": tensors(10), "trainer_state.json": b"{}"})
    said = served.run("flush", served.mnt).stdout
    assert states(served, f"{run}/checkpoint-20") == ["published"]
    assert re.search(rf"not complete, so not published:(\n.*)*\n  {re.escape(run)}/step_7, waiting: ", said)
    assert f"{run}/step_7" in json.loads(served.run("flush", served.mnt, "--json").stdout)["open"]
    shutil.rmtree(served.mnt / run / "step_7")


def test_a_wait_says_once_why_it_takes_long(served, run):
    """On stderr; then it waits on, and ends as it would have."""
    (served.mnt / run / "step-1").mkdir(parents=True)
    put(served.mnt / run / "step-1/x.bin", b"x")
    waiting = subprocess.Popen([*CACHEFS, "wait", served.mnt / run / "step-1"], stderr=subprocess.PIPE, text=True)
    try:
        assert waiting.stderr is not None
        first = waiting.stderr.readline()
        assert first.startswith(f"cachefs: {run}/step-1 is open and not published yet: waiting: ")
        save(served.mnt / run / "step-1", files(1))
        assert waiting.communicate(timeout=PATIENCE)[1] == ""
        assert waiting.returncode == 0
    finally:
        waiting.kill()
        waiting.wait()


# ---- the store alone


def test_ls(served, run, published):
    """All runs, and the generations of one, the newest first; for people and for programs."""
    assert run in from_store(served, "ls")
    runs = json.loads(from_store(served, "ls", "--json"))
    assert run in [one["name"] for one in runs]
    lines = from_store(served, "ls", run).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["step-2", "2"], ["step-1", "1"]]
    entries = json.loads(from_store(served, "ls", run, "--json"))
    assert [entry["published"]["generation"] for entry in entries] == ["step-2", "step-1"]
    assert json.loads(from_store(served, "ls", f"{run}/", "--json")) == entries
    from_store(served, "ls", "no such run", code=66)


def test_ls_of_what_is_no_store(tmp_path):
    """It stays what it was."""
    result = CliRunner().invoke(app, ["ls", "--store", f"file://{tmp_path}"])
    assert (result.exit_code, result.output) == (0, f"no runs in file://{tmp_path}\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_who_may_only_read_a_directory_store_can_list_verify_and_restore(served, run, published):
    """Without a lease, which is said."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # the directory of the test is closed to other users
        store = shutil.copytree(served.root / "store", Path(place) / "store")
        Path(place).chmod(0o777)

        def commands(target: str) -> list[Any]:
            asked = (["ls", run], ["verify", run], ["restore", run, f"{place}/{target}"])
            results = [CliRunner().invoke(app, [*one, "--store", f"file://{store}"]) for one in asked]
            return [[result.exit_code, "no lease" in result.stderr] for result in results]

        commands("warm")  # what is imported late cannot be read by everybody
        assert as_user(1234, store, lambda: commands("target")) == [[0, False], [0, True], [0, True]]
        assert_same(contents(Path(place) / "target/step-2"), published[2])


def test_verify(served, run, published):
    """By bytes and by checksums, the newest and an older generation."""
    newest = json.loads(from_store(served, "verify", run, "--json"))
    size = sum(map(len, published[2].values()))
    assert newest == {"run": run, "generation": "step-2", "level": "bytes", "shards": 3, "bytes": size}
    assert from_store(served, "verify", run, "-g", "step-1").startswith(f"{run}/step-1: 3 shards, ")
    assert json.loads(from_store(served, "verify", run, "--checksums-only", "--json"))["level"] == "checksum"
    text = from_store(served, "verify", run, "--checksums-only")
    assert text == f"{run}/step-2: 3 shards, {size} bytes, checksums as recorded; no bytes were read\n"
    from_store(served, "verify", run, "-g", "step-9", code=66)


def test_verify_finds_a_flipped_byte(served, run, published):
    """It names the shard; a restore of it leaves nothing behind."""
    stored = [path for path in (served.root / "store").rglob("*") if path.is_file()]
    wanted = published[2]["deep/model-2.safetensors"]
    [shard] = [path for path in stored if run.split()[-1] in str(path) and path.read_bytes() == wanted]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    said = from_store(served, "verify", run, code=65)
    assert "deep/model-2.safetensors" in said
    assert "restore it with -g, or let cachefs rollback" in said
    target = served.root / "damaged"
    said = from_store(served, "restore", run, target, code=65)
    assert "deep/model-2.safetensors" in said
    assert f"another generation may be whole (cachefs ls {run})" in said
    assert not target.exists() or os.listdir(target) == []
    from_store(served, "verify", run, "-g", "step-1")


def test_restore(served, run, published, tmp_path):
    """The newest or an older generation; existing ones are replaced only when that is asked for. A shell completes the
    name of the run with a slash.
    """
    text = from_store(served, "restore", f"{run}/", tmp_path / "new")
    assert text == f"{tmp_path}/new/step-2: 3 shards, {sum(map(len, published[2].values()))} bytes\n"
    assert_same(contents(tmp_path / "new/step-2"), published[2])
    answer = json.loads(from_store(served, "restore", run, tmp_path / "new", "--generation", "step-1", "--json"))
    assert (answer["path"], answer["shards"]) == (f"{tmp_path}/new/step-1", 3)
    assert_same(contents(tmp_path / "new/step-1"), published[1])

    put(tmp_path / "new/step-2/mine", b"x")
    done = served.run("restore", run, tmp_path / "new", "--store", served.store, check=False)
    assert (done.returncode != 0, "Traceback" in done.stderr) == (True, False)
    assert "--replace" in done.stderr
    assert (tmp_path / "new/step-2/mine").exists()
    from_store(served, "restore", run, tmp_path / "new", "--replace")
    assert_same(contents(tmp_path / "new/step-2"), published[2])


def test_a_restore_into_a_mount_is_one_save(served, run, published):
    """Of its own run; what it writes under temporary names is published nowhere, nor mirrored."""
    target = served.mnt / run / "restored"
    for _ in range(2):
        from_store(served, "restore", run, target, "--replace")
        served.wait(f"{run}/restored/step-2")
    assert_same(contents(target / "step-2"), published[2])
    assert [name for name in runs(served) if name.startswith(run)] == [run, f"{run}/restored"]
    assert len(json.loads(from_store(served, "ls", f"{run}/restored", "--json"))) == 2
    assert "restoring" not in "".join(map(str, Path(served.store[7:]).rglob("*")))


def test_a_save_that_is_renamed_into_place_is_one_save(served, run):
    """Whatever it was called before, and whatever its files look like each by itself."""
    for temp, step in ((".tmp-foo", 80), ("checkpoint-90.tmp", 90)):
        (served.mnt / run / temp).mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.safetensors"):
            put(served.mnt / run / temp / name, tensors(100, name))
        put(served.mnt / run / temp / "trainer_state.json", b"{}")
        (served.mnt / run / temp).rename(served.mnt / run / f"checkpoint-{step}")
        served.wait(f"{run}/checkpoint-{step}")
    assert [name for name in runs(served) if name.startswith(run)] == [run]
    assert len(json.loads(from_store(served, "ls", run, "--json"))) == 2


def runs(one: Node) -> list[str]:
    """Return the names of the runs of the store."""
    return sorted(entry["name"] for entry in json.loads(from_store(one, "ls", "--json")))


def test_restore_into_what_cannot_be_written(served, run, published, tmp_path):
    """One line, nothing left; 77 where nobody may write."""
    put(tmp_path / "file", b"")
    for place, code in ((tmp_path / "file", 1), (Path("/proc/nothing"), 1), (Path("/sys/nothing"), 77)):
        from_store(served, "restore", run, place, code=code)
    from_store(served, "restore", "no such run", tmp_path, code=66)


def test_the_store_comes_from_flag_environment_or_file(served, run, published, tmp_path):
    """Without any it is said what to give."""
    done = subprocess.run([*CACHEFS, "ls", run], capture_output=True, text=True, check=False)
    assert (done.returncode, "store is not set" in done.stderr) == (2, True)
    environ = {**os.environ, "CACHEFS_STORE": served.store}
    subprocess.run([*CACHEFS, "ls", run], env=environ, capture_output=True, check=True)
    (tmp_path / "cachefs.toml").write_text(f"store = {json.dumps(served.store)}\n")
    subprocess.run([*CACHEFS, "ls", run, "--config", tmp_path / "cachefs.toml"], capture_output=True, check=True)


# ---- doctor


def test_doctor_finds_a_healthy_system(served, tmp_path):
    """Every check of the probe is listed; the store is left as it was."""
    (tmp_path / "store").mkdir()
    arguments = ("doctor", "--store", f"file://{tmp_path}/store", "--staging", tmp_path / "new/staging")
    text = served.run(*arguments).stdout
    assert not re.search("^fail", text, re.MULTILINE)
    for what in ("fuse", "staging", "store", "probe "):
        assert re.search(rf"^ok +{what}", text, re.MULTILINE), what
    findings = json.loads(served.run(*arguments, "--json").stdout)
    assert {one["ok"] for one in findings} == {True}
    assert not (tmp_path / "new").exists()


def test_doctor_says_what_is_wrong(served, tmp_path):
    """The exit code is that of the error a mount would stop with; everything else is still looked at."""
    arguments = ("doctor", "--store", f"file://{tmp_path}/nothing", "--staging", "/proc/x")
    done = served.run(*arguments, check=False)
    check_message(done, done.returncode)
    assert done.returncode == 74
    assert re.search(r"^fail +staging", done.stdout, re.MULTILINE)
    assert re.search(r"^fail +store +file://", done.stdout, re.MULTILINE)
    assert re.search(r"^ok +fuse", done.stdout, re.MULTILINE)
    findings = json.loads(served.run(*arguments, "--json", check=False).stdout)
    assert [one["what"] for one in findings if not one["ok"]] == ["staging", "store"]


def mountpoint(path: Path, code: int = 0) -> str:
    """Return what doctor finds at a mountpoint."""
    done = subprocess.run([*CACHEFS, "doctor", path, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    check_message(done, code)
    (found,) = [one for one in json.loads(done.stdout) if one["what"] == "mountpoint"]
    assert found["ok"] == (code == 0)
    return f"{found['text']}; {found['hint']}"


def test_doctor_looks_at_the_mountpoint(served, tmp_path):
    """What a mount would find there, and nothing is changed."""
    assert f"is served by cachefs (pid {served.process.pid})" in mountpoint(served.mnt)
    assert "is made at the start" in mountpoint(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert "is empty" in mountpoint(tmp_path)
    put(tmp_path / "file", b"x")
    assert "it is not a directory" in mountpoint(tmp_path / "file", 73)
    found = mountpoint(tmp_path, 73)
    assert "is not empty (file, ...)" in found
    assert "written while nothing was mounted" in found
    assert "is already a mountpoint (proc)" in mountpoint(Path("/proc"), 73)


def test_doctor_finds_a_dead_mount(tmp_path):
    (tmp_path / "store").mkdir()
    with node(tmp_path, f"file://{tmp_path}/store") as one:
        one.kill()
        assert "is gone; start it again" in mountpoint(one.mnt, 73)
