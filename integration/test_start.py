"""Starting and stopping: what a mount cannot start with, what it starts with all the same, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from cachefs.metrics import Metrics
from integration.node import PATIENCE, Node, await_condition, node
from integration.posix import put
from integration.proxy import lose_request, refused
from integration.world import await_state, metric, save, states, status, tensors, world  # noqa: F401
from tests.servers import Server
from tests.servers.ports import free_port

pytestmark = [pytest.mark.mount, pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")]
FILES = {"model-1.safetensors": tensors(1000), "model-2.safetensors": tensors(10)}


@pytest.fixture
def one(tmp_path) -> Iterator[Node]:
    """A node on a directory store, not started."""
    (tmp_path / "store").mkdir()
    made = Node(tmp_path, f"file://{tmp_path}/store")
    yield made
    made.end()


# ---- what a mount cannot start with


def config_with(text: str) -> Callable[[Node], tuple[str, ...]]:
    def arrange(one: Node) -> tuple[str, ...]:
        (one.root / "cachefs.toml").write_text(text)
        return ("--config", str(one.root / "cachefs.toml"))

    return arrange


def misspelt_variable(one: Node) -> tuple[str, ...]:
    one.environ["CACHEFS_STAGNG"] = "/x"
    return ()


def mountpoint_is_a_file(one: Node) -> tuple[str, ...]:
    one.mnt.write_text("")
    return ()


def mountpoint_is_not_empty(one: Node) -> tuple[str, ...]:
    one.mnt.mkdir()
    (one.mnt / "file").write_text("")
    return ()


def staging_is_a_file(one: Node) -> tuple[str, ...]:
    one.staging.write_text("")
    return ()


def damaged_journal(one: Node) -> tuple[str, ...]:
    (one.staging / "journal").mkdir(parents=True)
    (one.staging / "journal/data.mdb").write_bytes(b"x" * 100_000)
    return ()


def missing_store(one: Node) -> tuple[str, ...]:
    (one.root / "store").rmdir()
    return ()


def given(*extra: str) -> Callable[[Node], tuple[str, ...]]:
    return lambda one: extra


@pytest.mark.parametrize(
    ("arrange", "code", "message"),
    [
        pytest.param(given("--part-size", "1"), 2, r"part_size = '1' \(from --part-size\)", id="bad value"),
        pytest.param(given("--presets", "nothing"), 2, "preset", id="unknown preset"),
        pytest.param(given("--run", "../x"), 2, "run = '../x'", id="bad run"),
        pytest.param(
            config_with("stagin = '/x'"), 2, "unknown key 'stagin' .*did you mean 'staging'", id="unknown key"
        ),
        pytest.param(config_with("= what"), 2, "is not valid TOML", id="no TOML"),
        pytest.param(misspelt_variable, 2, "did you mean CACHEFS_STAGING", id="unknown variable"),
        pytest.param(given("--metrics", "127.0.0.1:1x"), 2, "metrics = ", id="bad address"),
        pytest.param(given("--log-file", "x", "--nonsense"), 2, "No such option", id="unknown flag"),
        pytest.param(mountpoint_is_a_file, 73, "it is not a directory", id="mountpoint is a file"),
        pytest.param(mountpoint_is_not_empty, 73, r"is not empty \(file, ...\)", id="mountpoint is not empty"),
        pytest.param(staging_is_a_file, 74, "staging directory .* cannot be used", id="staging is a file"),
        pytest.param(damaged_journal, 74, "the journal in .* cannot be opened", id="damaged journal"),
        pytest.param(missing_store, 66, "No such file or directory", id="no store"),
    ],
)
def test_an_error_at_the_start_is_clear_and_has_its_exit_code(one, arrange, code, message):
    """One line, perhaps a hint, no traceback, nothing mounted."""
    seen, said = one.refuses_to_start(*arrange(one))
    assert re.search(message, said), said
    assert seen == code
    assert len(said.splitlines()) <= 4


def test_a_used_address_for_metrics_is_refused(one):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = one.refuses_to_start("--metrics", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (code, "in use" in said) == (2, True)


def test_one_staging_and_one_mountpoint_for_one_daemon(one):
    """The others are refused, and the first does not notice."""
    one.start()
    put(one.mnt / "file", b"x")
    same_mountpoint = Node(one.root, one.store)
    same_mountpoint.staging = one.root / "other-staging"
    done = subprocess.run(same_mountpoint.command(), capture_output=True, text=True, check=False)
    assert (done.returncode, "already a mountpoint (fuse.cachefs)" in done.stderr) == (73, True)
    same_staging = Node(one.root, one.store)
    same_staging.mnt = one.root / "other-mnt"
    code, said = same_staging.refuses_to_start()
    assert one.process is not None
    assert (code, f"in use by another cachefs daemon (pid {one.process.pid})" in said) == (74, True)
    assert (one.mnt / "file").read_bytes() == b"x"
    assert one.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel data path needs root")
def test_root_of_a_user_namespace_is_refused_the_kernel_data_path_and_told_so(one):
    """As in a rootless container: its CAP_SYS_ADMIN is not the one that the kernel asks for."""
    one.inside = lambda command: ["unshare", "--user", "--map-root-user", "--mount", *command]
    code, said = one.refuses_to_start("--data-path", "kernel")
    assert (code, "only outside user namespaces" in said) == (73, True)
    assert "python: CAP_SYS_ADMIN counts only outside user namespaces" in " ".join(one.run("doctor").stdout.split())


def test_another_file_system_on_the_mountpoint_is_left_alone(one):
    one.mnt.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", one.mnt], check=True)
    try:
        done = subprocess.run(one.command(), capture_output=True, text=True, check=False)
        assert (done.returncode, "already a mountpoint (tmpfs)" in done.stderr) == (73, True)
        assert os.path.ismount(one.mnt)
    finally:
        subprocess.run(["umount", one.mnt], check=True)


@pytest.mark.server
def test_a_missing_bucket_is_not_found(moto_server: Server, tmp_path):
    one = Node(tmp_path, "s3://no-such-bucket-here/p", environ=moto_server.environ)
    code, said = one.refuses_to_start("--endpoint-url", moto_server.endpoint_url)
    assert (code, "no-such-bucket-here" in said) == (66, True)


@pytest.mark.server
def test_refused_credentials_are_said_at_the_start(world):  # noqa: F811
    """A store that answers 403 will not answer otherwise later: nobody should find out when the job is over."""
    world.proxy.on("", refused(403, "AccessDenied"), times=None)
    one = Node(world.root / "node", f"s3://{world.bucket.bucket}/p", environ=world._server.environ)
    code, said = one.refuses_to_start("--endpoint-url", world.proxy.url)
    assert (code, "AccessDenied" in said or "403" in said) == (77, True), said


# ---- what a mount starts with all the same


@pytest.mark.server
def test_a_store_without_versions_is_refused_and_mounted_with_no_publish(moto_server: Server, tmp_path):
    """It then keeps everything local, and says so wherever one looks."""
    bucket = moto_server.bucket(versioned=False)
    options = ("--endpoint-url", moto_server.endpoint_url)
    refusing = Node(tmp_path / "refusing", f"s3://{bucket}/p", options=options, environ=moto_server.environ)
    code, said = refusing.refuses_to_start()
    assert code == 76
    assert "--no-publish" in said

    options += ("--no-publish", "--metrics", f"127.0.0.1:{free_port()}")
    with node(tmp_path / "local", f"s3://{bucket}/p", options=options, environ=moto_server.environ) as one:
        save(one.mnt / "run/step-1", FILES)
        await_state(one, "run/step-1", "staged")
        assert status(one)["publishing_blocked"] == "mounted with --no-publish"
        assert re.search("NOT PUBLISHING +mounted with --no-publish", one.run("status", one.mnt).stdout)
        assert '"publishing": "mounted with --no-publish"' in one.logged()
        assert metric(one, "cachefs_publishing") == 0
        waited = one.run("wait", one.mnt / "run/step-1", "--timeout", "30", check=False)
        assert (waited.returncode, "--no-publish" in waited.stderr) == (76, True)
        assert one.run("flush", one.mnt, check=False).returncode == 76
        one.wait("run/step-1", "staged")
        assert one.stop() == 0


@pytest.mark.server
def test_a_store_that_is_away_at_the_start_gets_everything_when_it_is_back(world):  # noqa: F811
    """The mount serves at once, says that nothing is published, and goes on unaided."""
    world.proxy.on("", lose_request, times=None)
    one = world.node(metrics=True)
    saved = save(one.mnt / "run/step-1", FILES)
    await_state(one, "run/step-1", "staged")
    assert "does not answer" in status(one)["publishing_blocked"]
    assert metric(one, "cachefs_publishing") == 0
    assert "store does not answer" in one.logged()
    world.proxy.end()
    await_state(one, "run/step-1")
    assert status(one)["publishing_blocked"] == ""
    await_condition(lambda: metric(one, "cachefs_publishing") == 1, "the metric says so, too")
    world.verify(one, "run", saved)


def test_a_mount_that_a_killed_daemon_left_is_cleaned_up(one):
    """The next start needs no help, and the files are there."""
    one.start()
    put(one.mnt / "file", b"written before the kill")
    one.kill()
    with pytest.raises(OSError, match="not connected"):
        os.stat(one.mnt)
    one.start()
    assert (one.mnt / "file").read_bytes() == b"written before the kill"
    assert one.stop() == 0
    assert Path("/proc/self/mounts").read_text().count(f" {one.mnt} ") == 0


def test_staging_may_lie_deeper_than_a_socket_address_is_long(one):
    one.staging = one.root / ("deep" * 20) / ("deeper" * 20) / "staging"
    one.start()
    assert len(os.getxattr(one.mnt, "user.cachefs.socket")) > 108
    assert status(one)["staging"] == str(one.staging)
    assert json.loads(one.run("status", "--json", one.mnt).stdout)["staging"] == str(one.staging)
    assert one.stop() == 0


# ---- in the background, under a service manager


def test_daemon_returns_when_the_mount_serves(one):
    """The log goes to the file, the terminal is free, and the daemon outlives the directory it was started in."""
    (one.root / "cwd").mkdir()
    command = one.command("--daemon", "--log-file", "../daemon.log")
    done = subprocess.run(command, cwd=one.root / "cwd", capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout == done.stderr == ""
    pid = status(one)["pid"]
    assert (one.staging / "lock").read_text() == f"{pid}\n"
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    put(one.mnt / "x.pt", b"x")
    one.wait("x.pt")
    os.kill(pid, signal.SIGTERM)
    await_condition(lambda: not os.path.exists(f"/proc/{pid}"), "the daemon is gone")
    assert not os.path.ismount(one.mnt)
    assert '"event": "mounted"' in one.logged()


def test_daemon_returns_the_exit_code_of_a_start_that_failed(one):
    """With the message on the terminal it was started from."""
    one.mnt.write_text("")
    code, said = one.refuses_to_start("--daemon")
    assert (code, "it is not a directory" in said) == (73, True)
    one.mnt.unlink()
    code, said = one.refuses_to_start("--daemon", "--log-file", "/proc/nothing")
    assert (code, "cannot write the log file" in said) == (1, True)


def test_the_service_manager_is_told_what_happens(one):
    """READY once the mount serves, STATUS and WATCHDOG from then on, STOPPING and the time to wait at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(one.root / "notify"))
        manager.settimeout(PATIENCE)
        one.environ |= {"NOTIFY_SOCKET": str(one.root / "notify"), "WATCHDOG_USEC": "500000"}

        def until(field: str) -> list[str]:
            seen: list[str] = []
            while not any(line.startswith(field) for line in seen):
                seen += manager.recv(4096).decode().splitlines()
            return seen

        one.start()
        first = until("READY=1")
        assert any(line.startswith("STATUS=") and "to flush" in line for line in first)
        until("WATCHDOG=1")
        stopper = threading.Thread(target=one.stop)
        stopper.start()
        assert any(line == "STATUS=draining" for line in until("STOPPING=1"))
        until("EXTEND_TIMEOUT_USEC=50000000")  # drain_timeout, and what comes after it
        stopper.join()


def test_metrics_are_served_under_the_documented_names(one):
    port = free_port()
    one.start("--metrics", f"127.0.0.1:{port}")
    put(one.mnt / "run.pt", b"x")
    one.wait("run.pt")
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    served = set(re.findall(r"^# TYPE (cachefs_\w+)", text, re.MULTILINE))
    assert served == {row.name for row in Metrics().rows}
    one.options += ("--metrics", f"127.0.0.1:{port}")
    await_condition(lambda: metric(one, "cachefs_generations", state="published") == 1, "the save is counted")
    assert metric(one, "cachefs_oldest_open_seconds") == 0
    (one.mnt / "run/step_10").mkdir(parents=True)
    put(one.mnt / "run/step_10/model.safetensors", tensors(10))
    await_condition(lambda: metric(one, "cachefs_oldest_open_seconds") > 0, "a save that nothing closes is seen")
    (seen,) = status(one)["generations"][1:]
    assert (seen["state"], seen["preset"]) == ("open", "")
    assert seen["waiting"].startswith("no preset in use knows these files")
    assert one.stop() == 0


# ---- the end


@pytest.mark.server
@pytest.mark.parametrize("how", ["SIGTERM", "umount", "SIGTERM twice"])
def test_stopping_with_the_store_away_loses_nothing_and_says_what_waits(world, how):  # noqa: F811
    """Exit code 75 and the number of files; the next start publishes. A second signal cuts the drain short."""
    one = world.node("node", "--drain-timeout", "120" if "twice" in how else "1")
    world.proxy.on("PutObject", lose_request, key="/shards/", times=None)
    saved = save(one.mnt / "run/step-1", FILES)
    await_state(one, "run/step-1", "staged")
    assert one.process is not None
    if how == "umount":
        subprocess.run(["fusermount3", "-u", one.mnt], check=True)
    else:
        one.process.send_signal(signal.SIGTERM)
    if "twice" in how:
        await_condition(lambda: '"event": "unmounting"' in one.logged(), "the drain has begun")
        one.process.send_signal(signal.SIGTERM)
    code = one.process.wait(PATIENCE)
    one.process = None
    assert code == 75
    assert re.search(
        r"stopped with 1 generations not published: 3 files, \d{4} bytes not in the store yet", one.logged()
    )
    assert not os.path.ismount(one.mnt)
    world.proxy.end()
    one.start()
    await_state(one, "run/step-1")
    world.verify(one, "run", saved)


def test_stopping_waits_for_the_backlog(one):
    """A save that was closed a moment ago is published before the daemon ends."""
    one.start()
    saved = save(one.mnt / "run/step-1", FILES)
    assert one.stop() == 0
    one.restore("run", one.root / "restored")
    found = {path.name: path.read_bytes() for path in (one.root / "restored/step-1").iterdir()}
    assert found == saved


def test_a_save_that_waits_for_its_quiet_is_pending_at_the_end(one):
    """Its close signal came, so it is complete: exit code 75 and what it waits for; the next start publishes it."""
    one.start("--quiet", "60", "--drain-timeout", "0.5")
    (one.mnt / "run/checkpoint-20").mkdir(parents=True)
    put(one.mnt / "run/checkpoint-20/model.safetensors", tensors(10))
    put(one.mnt / "run/checkpoint-20/trainer_state.json", b"{}")
    (one.mnt / "run/checkpoint-30").mkdir()
    put(one.mnt / "run/checkpoint-30/model.safetensors", tensors(10))
    assert one.stop() == 75
    assert "a stop may leave complete saves unpublished" in one.logged()
    assert "stopped with 1 generations not published" in one.logged()
    assert "run/checkpoint-20, waiting: hf-trainer: quiet after: trainer_state.json closed" in one.logged()
    assert re.search('"saves are left open".*run/checkpoint-30|run/checkpoint-30.*"saves are left open"', one.logged())
    one.start()
    await_state(one, "run/checkpoint-20")
    assert one.stop() == 0


@pytest.mark.parametrize("how", ["fusermount3", "SIGINT"])
def test_ending_with_nothing_to_do_is_clean(one, how):
    one.start()
    put(one.mnt / "loose.txt", b"x")
    assert one.process is not None
    if how == "SIGINT":
        assert one.stop(signal.SIGINT) == 0
    else:
        subprocess.run(["fusermount3", "-u", one.mnt], check=True)
        assert one.process.wait(PATIENCE) == 0
        one.process = None
    assert not os.path.ismount(one.mnt)
    assert (one.staging / "tree/loose.txt").read_bytes() == b"x"


def test_a_stop_does_not_wait_for_who_still_has_files_open(one):
    """They get an error; what they wrote is in staging, and is there after the next start."""
    one.start()
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; f = open('file', 'wb', 0); f.write(b'x'); print(flush=True); time.sleep(99)",
        ],
        cwd=one.mnt,
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert one.stop() == 0
        one.start()
        assert (one.mnt / "file").read_bytes() == b"x"
        assert states(one, "file") == []
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert one.stop() == 0
