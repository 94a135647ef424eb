"""The control socket under requests that a command never sends."""

from __future__ import annotations

import errno
import json
import os
import threading
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import trio

from cachefs import control
from cachefs.errors import FencedError, InvalidError, NotFoundError, UnavailableError, WaitTimeout
from cachefs.formats.manifest import Pin
from cachefs.formats.records import AttemptRecord, Identity, RunRecord, ShardRecord, State
from cachefs.journal import Journal
from cachefs.reporter import Live, Reporter
from cachefs.status import Flushed, read, snapshot


class Daemon:
    """A served socket whose handler does what the test says."""

    def __init__(self, path) -> None:
        self.path = path
        self.seen: list[control.Request] = []
        self.cancelled = trio.Event()

    async def wait_seen(self, count: int) -> None:
        with trio.fail_after(30):
            while len(self.seen) < count:  # noqa: ASYNC110 - short, and the count differs
                await trio.sleep(0.01)

    async def handle(self, request, peer):
        self.seen.append(request)
        match request:
            case control.CloseRequest("broken"):
                raise KeyError("broken")
            case control.CloseRequest("unknown"):
                raise NotFoundError("unknown is not there")
            case control.WaitRequest():
                try:
                    await trio.sleep_forever()
                finally:
                    self.cancelled.set()
        return "fine"

    async def ask(self, line: bytes):
        """Send a line and return the answer."""
        async with await trio.open_unix_socket(self.path) as stream:
            await stream.send_all(line + b"\n")
            answer = b""
            with trio.fail_after(30):
                while not answer.endswith(b"\n"):
                    chunk = await stream.receive_some()
                    if not chunk:
                        return None
                    answer += chunk
            return json.loads(answer)


STATUS = b'{"type":"status"}'
WAIT = b'{"type":"wait","path":"x","state":"published"}'


@pytest.fixture
async def daemon(tmp_path, nursery):
    made = Daemon(tmp_path / "control.sock")
    await nursery.start(control.serve, made.path, made.handle)
    return made


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"wait","path":"x","state":"bogus"}',
        b'{"type":"wait","path":"x","state":"published","timeout":-1}',
        b'{"type":"flush","timeout":-1}',
        b'{"type":"nothing"}',
        b"\xff\xfe",
        b"{",
    ],
)
async def test_a_request_that_is_none_is_answered_and_does_no_harm(daemon, line):
    assert (await daemon.ask(line))["failure"]["exit_code"] == 2
    assert daemon.seen == []
    assert (await daemon.ask(STATUS))["result"] == "fine"


async def test_a_request_that_fails_is_answered_and_logged(daemon, declared_warnings):
    declared_warnings("a request failed request=CloseRequest")
    assert (await daemon.ask(b'{"type":"close","path":"broken"}'))["failure"]["exit_code"] == 70
    assert (await daemon.ask(b'{"type":"close","path":"unknown"}'))["failure"]["exit_code"] == 66
    assert (await daemon.ask(STATUS))["result"] == "fine"


async def test_no_descriptors_left_for_a_while_are_outlived(daemon, monkeypatch, declared_warnings):
    declared_warnings("accept returned EMFILE")
    accept, failed = trio.SocketListener.accept, trio.Event()

    async def full(self):
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(self)

    monkeypatch.setattr(trio.SocketListener, "accept", full)
    await daemon.ask(STATUS)  # its accept began before
    assert failed.is_set()
    assert (await daemon.ask(STATUS))["result"] == "fine"


async def test_a_socket_that_lies_deep_is_reached_and_leaves_no_descriptor_open(tmp_path, nursery):
    """A command that asks again and again, as `status --watch`, would run out of them."""
    path = tmp_path / ("deep" * 30) / "control.sock"
    path.parent.mkdir()
    await nursery.start(control.serve, path, Daemon(path).handle)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        assert await trio.to_thread.run_sync(control.ask, path, control.StatusRequest()) == "fine"
    with pytest.raises(UnavailableError):
        control.ask(path.with_name("nobody.sock"), control.StatusRequest())
    with trio.fail_after(30):
        while len(os.listdir("/proc/self/fd")) > len(before):  # noqa: ASYNC110 - the daemon's end closes by itself
            await trio.sleep(0.01)


async def test_connections_are_bounded(daemon, monkeypatch, tmp_path, nursery):
    monkeypatch.setattr(control, "CONNECTIONS", 2)
    few = Daemon(tmp_path / "few.sock")
    await nursery.start(control.serve, few.path, few.handle)
    waits = [await trio.open_unix_socket(few.path) for _ in range(2)]
    for stream in waits:
        await stream.send_all(WAIT + b"\n")
    await few.wait_seen(2)
    assert "too many" in (await few.ask(STATUS))["failure"]["message"]
    for stream in waits:
        await stream.aclose()
    with trio.fail_after(30):
        while (await few.ask(STATUS))["failure"] is not None:
            pass


async def test_who_goes_away_is_not_waited_for(daemon):
    async with await trio.open_unix_socket(daemon.path) as stream:
        await stream.send_all(WAIT + b"\n")
        await daemon.wait_seen(1)
    with trio.fail_after(30):
        await daemon.cancelled.wait()


async def test_who_says_nothing_is_let_go(daemon, monkeypatch):
    monkeypatch.setattr(control, "TRANSFER_TIMEOUT", 0.05)
    async with await trio.open_unix_socket(daemon.path) as stream:
        await stream.send_all(b"{")
        with trio.fail_after(30):
            assert await stream.receive_some() == b""


class Answers:
    """A reporter on a real journal; `closed` are the paths that it asks to close, `open` what open saves wait for,
    `closing` those whose close signal came.
    """

    def __init__(self, tmp_path, journal: Journal) -> None:
        self.journal = journal
        self.closed: list[bytes] = []
        self.open: dict[str, str] = {}
        self.closing: list[str] = []
        self.health = "ok"
        self.tree = tmp_path / "tree"
        self.tree.mkdir()
        live = Live(
            publishing_blocked=str,
            store_health=lambda: self.health,
            data_path=str,
            staging_free=int,
            loose_pending=int,
            open_saves=lambda: self.open,
            closing=lambda: self.closing,
            close_now=self.close,
            in_generation=lambda path: path.startswith(b"run/step-"),
        )
        self.reporter = Reporter(
            journal, SimpleNamespace(publish=True), "s3://bucket", tmp_path / "control.sock", self.tree, live
        )
        self.handle = partial(self.reporter.handle, peer=control.Peer(0))

    async def put(self, path: str, state: State, **fields) -> None:
        """Journal an attempt."""
        record = AttemptRecord(
            attempt=path, path=path, run="run", generation=path, kind="directory", preset="", step=0, opened_at=0.0,
            serial=9, state=state, **fields,
        )  # fmt: skip
        await self.journal.write(lambda txn: txn.attempts.put(path, record))

    async def close(self, path: bytes) -> str:
        self.closed.append(path)
        return "attempt"


@pytest.fixture
def answers(tmp_path):
    journal = Journal(tmp_path / "journal")
    record = AttemptRecord(
        attempt="a", path="run/step-2", run="run", generation="step-2", kind="directory", preset="", step=2,
        opened_at=0.0, serial=1, state=State.PUBLISHED, closed_at=1.0,
    )  # fmt: skip
    journal.write_now(lambda txn: txn.attempts.put("a", record))
    yield Answers(tmp_path, journal)
    journal.close()


@pytest.mark.parametrize("path", ["../outside", "/etc", "a/../../outside", "", ".", "a//b", "a\0b"])
@pytest.mark.parametrize("make", [control.CloseRequest, lambda path: control.WaitRequest(path, State.STAGED)])
async def test_a_path_that_leaves_the_mount_is_refused(answers, tmp_path, path, make):
    (tmp_path / "outside").mkdir()
    with pytest.raises(InvalidError, match="no path inside the mount"):
        await answers.handle(make(path))
    assert answers.closed == []


async def test_a_path_in_the_mount_is_closed(answers):
    (answers.tree / "run").mkdir()
    assert await answers.handle(control.CloseRequest("run")) == "attempt"
    assert answers.closed == [b"run"]


async def test_there_is_no_wait_for_an_end_that_is_no_promise(answers):
    with pytest.raises(InvalidError):
        await answers.handle(control.WaitRequest("run/step-2", State.ABANDONED))
    assert await answers.handle(control.WaitRequest("run/step-2", State.STAGED)) == State.PUBLISHED


async def test_a_wait_that_runs_out_says_what_is_waited_for(answers):
    await answers.put("run/step-3", State.OPEN)
    answers.open, answers.health = {"run/step-3": "the close signal"}, "timeout"
    with pytest.raises(WaitTimeout, match="run/step-3/x is open and not published yet") as raised:
        await answers.handle(control.WaitRequest("run/step-3/x", State.PUBLISHED, 0))
    assert raised.value.hint == "waiting: the close signal; the store: timeout"


async def test_a_flush_waits_for_saves_whose_close_signal_came(answers, autojump_clock):
    """And names those that have none, with what they wait for."""
    await answers.put("run/step-3", State.OPEN)
    await answers.put("run/step-4", State.OPEN)
    await answers.put("run/step-5", State.ABANDONED)
    answers.open = {"run/step-3": "quiet after: x closed", "run/step-4": "the close signal"}
    answers.closing = ["run/step-3"]
    with pytest.raises(WaitTimeout, match="1 generations are not published yet") as raised:
        await answers.handle(control.FlushRequest(0))
    assert raised.value.hint == "run/step-3: waiting: quiet after: x closed"

    async def publish() -> None:
        await trio.sleep(5)
        await answers.put("run/step-3", State.STAGED, closed_at=1.0)
        answers.closing = []
        await trio.sleep(5)
        await answers.put("run/step-3", State.PUBLISHED, closed_at=1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish)
        flushed = await answers.handle(control.FlushRequest(None))
    assert flushed == Flushed(published=2, abandoned=1, open={"run/step-4": "the close signal"})


async def test_a_flush_does_not_pass_over_what_is_fenced(answers):
    """A closed save of a run that another daemon has taken over is not in the store, and nobody sends it."""
    await answers.put("run/step-3", State.STAGED, closed_at=1.0)
    await answers.journal.write(lambda txn: txn.runs.put("run", RunRecord(run="run", fenced_by="other")))
    with pytest.raises(FencedError, match=r"1 closed saves stay in staging \(run/step-3\)") as raised:
        await answers.handle(control.FlushRequest(None))
    assert "restart this daemon" in raised.value.hint
    with pytest.raises(FencedError) as raised:
        await answers.handle(control.WaitRequest("run/step-3", State.PUBLISHED))
    assert "restart this daemon" in raised.value.hint


def test_a_file_of_a_forgotten_save_has_no_state(answers):
    """It may well be published: only what lies outside every generation is loose."""
    assert answers.reporter.answer(b"run/step-2/x", "state") == b"published"
    assert answers.reporter.answer(b"run/step-1/x", "state") is None
    assert answers.reporter.answer(b"run/log.txt", "state") == b"loose"


async def test_a_status_reads_the_journal_off_the_event_loop_and_once_per_commit(answers, monkeypatch):
    """Ten thousand shards take it a tenth of a second; who opens a file meanwhile does not wait for that."""
    journal, reporter = answers.reporter._journal, answers.reporter
    threads, read = [], reporter._read_journal
    monkeypatch.setattr(reporter, "_read_journal", lambda: (threads.append(threading.get_ident()), read())[1])
    first = await reporter.read()
    assert await reporter.read() is first
    assert len(threads) == 1
    await journal.write(lambda txn: txn.update_attempt("a", error="moved on"))
    assert (await reporter.read()).attempts[0].error == "moved on"
    await reporter.read()
    assert len(threads) == 2
    journal.write_now(lambda txn: txn.update_attempt("a", error="by the engine, and not heard of yet"))
    assert (await reporter.read()).attempts[0].error == "by the engine, and not heard of yet"
    assert threading.get_ident() not in threads


async def test_what_was_read_just_before_a_commit_is_not_taken_for_what_follows_it(answers, monkeypatch):
    """A commit of the engine is announced an instant before readers see it."""
    journal, reporter = answers.reporter._journal, answers.reporter
    announced = journal.version + 1
    with monkeypatch.context() as early:
        early.setattr(Journal, "version", property(lambda self: announced))
        assert (await reporter.read()).attempts[0].state is State.PUBLISHED
        assert reporter.answer(b"run/step-2/x", "state") == b"published"
    journal.write_now(lambda txn: txn.update_attempt("a", state=State.ABANDONED))
    assert journal.version == announced
    assert (await reporter.read()).attempts[0].state is State.ABANDONED
    assert reporter.answer(b"run/step-2/x", "state") == b"abandoned"


def test_the_state_of_a_file_is_told_without_reading_the_shards_of_its_save(answers, monkeypatch):
    monkeypatch.setattr("cachefs.reporter.add_up", lambda shards: pytest.fail("read the shards"))
    assert answers.reporter.answer(b"run/step-2/x", "state") == b"published"
    assert answers.reporter.answer(b"run/step-2/x", "generation") == b"step-2"


def test_a_status_adds_up_what_is_flushed(answers):
    shard = ShardRecord(
        attempt="b", shard="s", paths=("f",), identity=Identity(1, 10, 1), mode=0o644, key="k", error="no answer"
    )
    sent = msgspec.structs.replace(shard, shard="t", pin=Pin("k", "v", 10, "sha"), error="")
    journal = answers.reporter._journal

    def write(txn):
        attempt = txn.attempts.get("a")
        txn.attempts.put("b", msgspec.structs.replace(attempt, attempt="b", serial=2, state=State.STAGED))
        txn.put_shard(shard)
        txn.put_shard(sent)

    journal.write_now(write)
    with journal.read() as txn:
        seen = snapshot(read(txn), now=11.0)
    assert (seen.backlog_files, seen.backlog_bytes, seen.oldest_unpublished_age) == (1, 10, 10.0)
    assert [(one.files, one.files_flushed, one.error) for one in seen.generations] == [(0, 0, ""), (2, 1, "no answer")]
    assert answers.reporter.answer(b"run/step-2/x", "flushed") == b"10/20"
    assert answers.reporter.answer(b"run/step-2/x", "error") == b"no answer"
