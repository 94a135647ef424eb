"""`cachefs flush` on a served socket: what it waited for, and what became of that."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from cachefs import control
from cachefs.cli import ask
from cachefs.errors import CachefsError
from cachefs.formats.records import AttemptRecord, State
from cachefs.journal import Journal
from cachefs.reporter import Live, Reporter


class Node:
    """A daemon's socket on a real journal, and nothing that moves its saves but the test."""

    def __init__(self, tmp_path: Path, journal: Journal) -> None:
        self.journal = journal
        self.socket = tmp_path / "control.sock"
        self.closing: list[str] = []
        self.asked = trio.Event()
        self.flushes = 0
        self._serial = 0
        live = Live(
            publishing_blocked=str,
            store_health=lambda: "ok",
            data_path=str,
            staging_free=int,
            loose_pending=int,
            open_saves=dict,
            close_now=str,
            closing=lambda: self.closing,
        )
        config = SimpleNamespace(
            publish=True,
            mountpoint=tmp_path,
            staging=tmp_path,
            member="n1",
            membership=SimpleNamespace(names=("n1",), count=1, owner=True),
        )
        self._reporter = Reporter(journal, config, "memory", self.socket, tmp_path, live)

    async def serve(self, request, peer):
        if isinstance(request, control.FlushRequest):
            self.asked.set()
            self.flushes += 1
        return await self._reporter.handle(request, peer)

    async def put(self, attempt: str, state: State, path: str = "", closed_at: float | None = 1.0) -> None:
        """Journal a save."""
        self._serial += 1
        made = AttemptRecord(
            attempt=attempt, path=path or f"run/{attempt}", run="run", generation=attempt, kind="directory", preset="",
            step=0, opened_at=0.0, serial=self._serial, state=state, closed_at=closed_at,
        )  # fmt: skip
        await self.journal.write(lambda txn: txn.attempts.put(attempt, made))

    async def update(self, attempt: str, **fields) -> None:
        await self.journal.write(lambda txn: txn.update_attempt(attempt, **fields))


@pytest.fixture
async def node(tmp_path, nursery, monkeypatch):
    journal = Journal(tmp_path / "journal")
    made = Node(tmp_path, journal)
    await nursery.start(control.serve, made.socket, made.serve)
    monkeypatch.setattr(control, "find", lambda _: (made.socket, tmp_path))
    await made.put("old", State.ABANDONED)
    yield made
    journal.close()


@pytest.fixture
def flush(node, nursery):
    """Run the command; what `happens`, does so once it waits."""

    async def run(happens=None, *, timeout: float | None = None, as_json: bool = False) -> None:
        async def happen() -> None:
            await node.asked.wait()
            await happens()

        if happens is not None:
            nursery.start_soon(happen)
        with trio.fail_after(30):
            await trio.to_thread.run_sync(partial(ask.flush, None, timeout=timeout, as_json=as_json))

    return run


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_complete_save_that_is_abandoned_while_a_flush_waits_fails_it(node, flush, capsys, as_json):
    await node.put("a", State.STAGED)
    await node.put("b", State.STAGED)

    async def happens() -> None:
        await node.update("a", state=State.ABANDONED, error="bytes damaged in staging")
        await node.update("b", state=State.PUBLISHED)

    with pytest.raises(CachefsError, match=r"1 complete saves were abandoned meanwhile \(run/a\)") as raised:
        await flush(happens, as_json=as_json)
    assert raised.value.exit_code == 1
    said = capsys.readouterr().out
    if as_json:
        answer = json.loads(said)
        assert (answer["published"], answer["abandoned"]) == (1, 2)
        assert answer["lost"] == {"run/a": "bytes damaged in staging"}
    else:
        assert said.endswith("ABANDONED meanwhile, 1 complete, and not published:\n  run/a: bytes damaged in staging\n")


async def test_a_loss_in_the_first_part_of_a_long_wait_counts(node, flush, monkeypatch, capsys):
    """The command asks a second time once it has said what it waits for."""
    monkeypatch.setattr(ask, "TELL", 0.3)
    await node.put("a", State.STAGED)
    await node.put("b", State.STAGED)

    async def happens() -> None:
        await node.update("a", state=State.ABANDONED, error="gone")
        while node.flushes < 2:  # noqa: ASYNC110 - short
            await trio.sleep(0.01)
        await node.update("b", state=State.PUBLISHED)

    with pytest.raises(CachefsError, match=r"\(run/a\)"):
        await flush(happens)
    assert "1 generations are not published yet" in capsys.readouterr().err


async def test_a_loss_is_named_when_the_wait_runs_out(node, flush, capsys):
    """The next flush would take it for an old one."""
    await node.put("a", State.STAGED)
    await node.put("b", State.STAGED)
    with pytest.raises(control.DaemonError) as raised:
        await flush(partial(node.update, "a", state=State.ABANDONED, error="gone"), timeout=0.3)
    assert raised.value.exit_code == 124
    assert "run/a was abandoned meanwhile: gone" in capsys.readouterr().err


async def test_a_save_whose_close_signal_came_and_that_could_not_be_pinned_is_lost(node, flush):
    await node.put("a", State.OPEN, closed_at=None)
    node.closing = ["run/a"]

    async def happens() -> None:
        node.closing = []
        await node.update("a", state=State.ABANDONED, error="its files could not be pinned")

    with pytest.raises(CachefsError, match=r"\(run/a\)"):
        await flush(happens)


async def test_what_no_flush_waits_for_is_not_lost(node, flush, capsys):
    """What was abandoned before, what the training drops before it is closed, what was never complete, and what a later
    save of the path has replaced.
    """
    await node.put("a", State.STAGED, path="run/a")
    await node.put("again", State.STAGED, path="run/a")
    await node.put("renamed", State.OPEN, closed_at=None)
    await node.put("removed", State.OPEN, closed_at=None)
    node.closing = ["run/renamed"]

    async def happens() -> None:
        await node.update("removed", state=State.ABANDONED, error="removed")
        await node.update("renamed", state=State.ABANDONED, error="renamed to x", cancelled=True)
        node.closing = []
        await node.update("a", state=State.ABANDONED, error="superseded")
        await node.update("again", state=State.PUBLISHED)

    await flush(happens, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["published"], answer["abandoned"], answer["lost"]) == (1, 4, {})
    await flush(as_json=True)
    assert json.loads(capsys.readouterr().out)["lost"] == {}
