"""What `cachefs status` shows."""

from __future__ import annotations

import json

import msgspec
import pytest

from cachefs.cli import show
from cachefs.problem import Problem
from cachefs.status import Status

STATUS = Status(
    version="1",
    pid=1,
    mountpoint="/mnt",
    store="s3://bucket",
    staging="/staging",
    member="n1",
    data_path="fuse",
    publishing_blocked="",
    store_health="ok",
    backlog_bytes=0,
    backlog_files=0,
    oldest_unpublished_age=0.0,
    loose_pending=0,
    staging_free_bytes=0,
    runs=(),
    generations=(),
)


def test_why_a_run_does_not_move(capsys: pytest.CaptureFixture[str]) -> None:
    problems = (Problem("exp/7", "members/c.json is not a valid MemberReport"), Problem("", "403"))
    status = msgspec.structs.replace(STATUS, problems=problems)
    with show.console.capture() as shown:
        show.console.print(show.status(status))
    lines = [line.split(maxsplit=1) for line in shown.get().splitlines() if "PROBLEM" in line]
    assert [text.strip() for _, text in lines] == [
        "exp/7: members/c.json is not a valid MemberReport",
        "search for runs: 403",
    ]
    show.json(status)
    assert json.loads(capsys.readouterr().out)["problems"] == [
        {"run": "exp/7", "error": "members/c.json is not a valid MemberReport"},
        {"run": "", "error": "403"},
    ]
