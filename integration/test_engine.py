"""The engine process: it dies alone without harm, dies with its mount process, and stays in the background."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.node import Node, await_condition, engine, node

pytestmark = pytest.mark.mount


@pytest.fixture
def mounted(tmp_path):
    (tmp_path / "store").mkdir()
    with node(tmp_path / "node", f"file://{tmp_path / 'store'}", options=("--part-size", "5MiB")) as one:
        yield one


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def save(one: Node, name: str, size: int) -> None:
    temp = one.mnt / "run" / f"tmp-checkpoint-{name}"
    temp.mkdir(parents=True)
    (temp / "model.bin").write_bytes(os.urandom(size))
    (temp / "trainer_state.json").write_text("{}")
    temp.rename(one.mnt / "run" / f"checkpoint-{name}")


def test_an_engine_that_is_killed_is_replaced_and_the_mount_serves_all_along(mounted, tmp_path):
    first = await_condition(lambda: engine(mounted), "there is an engine")
    save(mounted, "1", 40 << 20)
    os.kill(first, signal.SIGKILL)
    (mounted.mnt / "run" / "notes.txt").write_text("the mount serves")
    save(mounted, "2", 1 << 20)
    for number in ("1", "2"):
        mounted.wait(f"run/checkpoint-{number}")
    assert engine(mounted) not in (0, first)
    assert "the engine ended" in mounted.logged()
    original = (mounted.mnt / "run" / "checkpoint-1" / "model.bin").read_bytes()
    mounted.restore("run", tmp_path / "out", "--generation", "checkpoint-1")
    assert (tmp_path / "out" / "checkpoint-1" / "model.bin").read_bytes() == original


def test_an_engine_does_not_outlive_its_mount_process(mounted):
    """Or two engines would work on one journal after the next start."""
    pid = await_condition(lambda: engine(mounted), "there is an engine")
    mounted.kill()
    await_condition(lambda: not alive(pid), "the engine is gone")


def test_the_engine_lets_others_go_first(mounted):
    pid = await_condition(lambda: engine(mounted), "there is an engine")
    await_condition(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 10, "the engine is nice")
    assert mounted.process is not None
    assert os.getpriority(os.PRIO_PROCESS, mounted.process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    ours = os.sched_getaffinity(mounted.process.pid)
    await_condition(lambda: os.sched_getaffinity(pid) < ours or len(ours) == 1, "the engine leaves a processor alone")


def test_a_new_engine_does_not_take_back_a_run_that_its_daemon_has_lost(mounted, tmp_path):
    """Only a new daemon may: two daemons would take it from each other for ever."""
    save(mounted, "1", 1000)
    mounted.wait("run/checkpoint-1")
    with node(tmp_path / "other", mounted.store) as other:
        save(other, "2", 1000)
        other.wait("run/checkpoint-2")
        save(mounted, "3", 1000)
        await_condition(lambda: run_of(mounted)["fenced_by"], "the first daemon is fenced")
        os.kill(engine(mounted), signal.SIGKILL)
        await_condition(lambda: "the engine ended" in mounted.logged() and engine(mounted), "there is another engine")
        save(other, "4", 1000)
        other.wait("run/checkpoint-4")
        assert run_of(mounted)["fenced_by"]
        assert run_of(other) == {"run": "run", "epoch": 2, "fenced_by": ""}


def run_of(one: Node) -> dict[str, object]:
    """Return what a daemon says of the run."""
    return next(run for run in one.status()["runs"] if run["run"] == "run")
