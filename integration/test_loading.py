"""The restore test's level `load` in a whole daemon."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import signal
import sys
from pathlib import Path

import pytest

from integration.node import Node, await_condition, node
from integration.test_engine import alive, engine, save

pytestmark = pytest.mark.mount
USER = pwd.getpwuid(os.geteuid()).pw_name


def loading(tmp_path: Path, program: str, *options: str) -> Node:
    (tmp_path / "store").mkdir()
    command = shlex.join([sys.executable, "-c", program])
    given = ("--test-level", "load", "--load-command", command, "--load-user", USER, *options)
    return Node(tmp_path / "node", f"file://{tmp_path / 'store'}", options=given)


def evidence(one: Node, name: str) -> dict:
    """Return test.json of a published generation, as it lies in the store."""
    (attempt,) = [found["attempt"] for found in one.generations(f"run/checkpoint-{name}")]
    (found,) = Path(one.store.removeprefix("file://")).rglob(f"attempts/{attempt}/test.json*")
    bodies = [found] if found.is_file() else [path for path in found.rglob("*") if path.is_file()]
    return next(made for body in bodies if (made := _parsed(body)) is not None)


def _parsed(path: Path) -> dict | None:
    try:
        made = json.loads(path.read_bytes())
    except ValueError:
        return None
    return made if isinstance(made, dict) and "tested_by" in made else None


def test_a_save_is_published_when_its_copy_loads_and_not_otherwise(tmp_path):
    program = "import os, sys; size = os.path.getsize('model.bin'); print(size); sys.exit(size > 1000)"
    one = loading(tmp_path, program)
    try:
        one.start()
        save(one, "1", 1000)
        one.wait("run/checkpoint-1")
        found = evidence(one, "1")
        assert (found["level"], found["loaded"]["output"], found["loaded"]["user"]) == ("load", "1000\n", USER)
        save(one, "2", 1001)
        (ended,) = await_condition(
            lambda: [found for found in one.generations("run/checkpoint-2") if found["state"] == "abandoned"],
            "it ended",
        )
        assert "ended with status 1; its output ends: 1001" in ended["error"]
        assert list((one.staging / "load").iterdir()) == []
        assert one.stop() == 0
    finally:
        one.end()


def test_a_killed_engine_leaves_a_copy_and_a_command_that_the_next_one_ends(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    mark = str(tmp_path / "second")
    program = (
        "import os, time\n"
        f"if not os.path.exists({mark!r}):\n"
        f"    open({mark!r}, 'w').close()\n"
        f"    print(os.getpid(), file=open({str(pipe)!r}, 'w'), flush=True)\n"
        "    time.sleep(600)\n"
    )
    one = loading(tmp_path, program)
    try:
        one.start()
        save(one, "1", 1000)
        first = int(pipe.read_text())
        assert [path.name for path in (one.staging / "load").glob("*/*")] == ["checkpoint-1"]
        os.kill(engine(one), signal.SIGKILL)
        one.wait("run/checkpoint-1")
        await_condition(lambda: not alive(first), "the first command is gone")
        assert list((one.staging / "load").iterdir()) == []
    finally:
        one.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to name a user")
def test_root_must_say_who_loads(tmp_path):
    (tmp_path / "store").mkdir()
    given = ("--test-level", "load", "--load-command", "true")
    with node(tmp_path / "fine", f"file://{tmp_path / 'store'}", options=(*given, "--load-user", "nobody")):
        pass
    code, said = Node(tmp_path / "node", f"file://{tmp_path / 'store'}", options=given).refuses_to_start()
    assert code == 2
    assert "load_user is not set" in said
    assert "set load_user to an unprivileged user" in said
