"""log.py: what reaches journald, a terminal or a collector, and what must not."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Iterator

import pytest

from cachefs import log
from tests.conftest import DeclaredWarnings

LIBRARIES = ("boto3", "botocore", "s3transfer", "urllib3")


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """Give the stream to log to, and put the process's logging back afterwards."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("", *LIBRARIES)}
    yield io.StringIO()
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)


def records(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_has_event_facts_and_context(logs):
    log.configure("info", "auto", stream=logs, env={})
    with log.context(run="llama", generation="step-10"):
        log.get("cachefs.publish").info("published", path=b"caf\xc3\xa9/\xff", seconds=1.5, error=ValueError("x"))
    log.get("cachefs.publish").info("idle")
    first, second = records(logs)
    assert {key: value for key, value in first.items() if key != "time"} == {
        "level": "info", "event": "published", "logger": "cachefs.publish", "run": "llama", "generation": "step-10",
        "path": "café/%FF", "seconds": 1.5, "error": "x",
    }  # fmt: skip
    assert str(first["time"]).endswith("+00:00")
    assert "run" not in second


def test_text_is_one_line_with_quoted_values(logs):
    log.configure("info", "text", stream=logs, env={})
    log.get("cachefs.x").info("two\nlines", a="b c", d="e=f", n=None, empty="", plain="ok")
    (line,) = logs.getvalue().splitlines()
    assert line.split(" ", 1)[1] == r'info    two\nlines a="b c" d="e=f" n=None empty="" plain=ok'


def test_records_of_libraries_and_python_warnings_come_the_same_way(logs, declared_warnings):
    declared_warnings("pool is full: 10")
    declared_warnings("careful")
    log.configure("debug", "json", stream=logs, env={})
    logging.getLogger("urllib3.pool").warning("pool is full: %d", 10)
    logging.getLogger("botocore.endpoint").info("one line per request")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # catch_warnings put its own hook in place: take it again
        logging.captureWarnings(True)
        warnings.warn("careful", stacklevel=1)
    pool, python = records(logs)
    assert (pool["level"], pool["event"], pool["logger"]) == ("warning", "pool is full: 10", "urllib3.pool")
    assert python["logger"] == "py.warnings"


def test_levels_and_a_second_configure(logs):
    logger = log.get("cachefs.x")
    log.configure("info", "json", stream=logs, env={})
    logger.debug("hidden")
    logger.info("first")
    log.configure("debug", "json", stream=logs, env={})
    logger.debug("second")
    assert [record["event"] for record in records(logs)] == ["first", "second"]


def test_journald_gets_a_priority_on_every_line_and_no_time(logs, tmp_path, declared_warnings):
    declared_warnings("went wrong")
    declared_warnings("careful")
    with (tmp_path / "journal").open("w+") as stream:
        stat = os.fstat(stream.fileno())
        log.configure("debug", "auto", stream=stream, env={"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"})
        log.get("cachefs.x").info("ready", run="a")
        log.get("cachefs.x").debug("detail")
        log.get("cachefs.x").warning("careful")
        try:
            raise ValueError("broken")
        except ValueError:
            log.get("cachefs.x").exception("went wrong")
        stream.seek(0)
        lines = stream.read().splitlines()
    assert lines[:4] == ["<6>ready run=a", "<7>detail", "<4>careful", "<3>went wrong"]
    assert lines[4] == "<3>Traceback (most recent call last):"
    assert lines[-1] == "<3>ValueError: broken"
    assert all(line.startswith("<3>") for line in lines[4:])


def test_a_stream_that_was_redirected_away_from_journald_gets_no_priorities(logs, tmp_path):
    with (tmp_path / "file").open("w+") as stream:
        log.configure("info", "text", stream=stream, env={"JOURNAL_STREAM": "1:2"})
        log.get("cachefs.x").info("ready")
        stream.seek(0)
        assert stream.read().endswith(" info    ready\n")


@pytest.mark.parametrize("format", ["json", "text"])
def test_secrets_never_pass(logs, declared_warnings, format):
    declared_warnings("request")
    declared_warnings("failed")
    env = {"AWS_SECRET_ACCESS_KEY": "hunter2-secret-key", "AWS_SESSION_TOKEN": "hunter2-session"}
    log.configure("info", format, stream=logs, env=env)
    logger = log.get("cachefs.x")
    logger.info("facts", password="hunter2", api_token="hunter2", aws_secret=b"hunter2", private_key="hunter2")
    logger.info("url http://user:hunter2@host/x", endpoint="https://hunter2@host")
    logger.info("signed", url="https://b/k?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2&partNumber=1")
    headers = {
        "Authorization": b"AWS4-HMAC-SHA256 Credential=hunter2/2020/eu, SignedHeaders=host, Signature=hunter2",
        "X-Amz-Security-Token": b"hunter2",
        "Other": "kept",
    }
    logging.getLogger("botocore.auth").warning("request %s", headers)
    logger.info("Authorization: Basic hunter2 and authorization: Bearer hunter2")
    logger.info("the key hunter2-secret-key in the middle of words")
    try:
        raise ValueError("token hunter2-session refused")
    except ValueError:
        logger.exception("failed")
    text = logs.getvalue()
    assert "hunter2" not in text
    assert all(
        word in text for word in ("facts", "host/x", "partNumber=1", "kept", "in the middle of words", "refused")
    )


@pytest.mark.parametrize(
    "text",
    ["authorization failed", "no credentials found", "signature mismatch", "mail a@b.org", "http://host/p@q?x=1"],
)
def test_harmless_words_stay(text):
    assert log.redacted(text) == text


def test_undecodable_text_is_logged_and_not_lost(logs):
    log.configure("info", "json", stream=logs, env={})
    log.get("cachefs.x").info("name", value="a\udcffb")
    assert logs.getvalue().encode()
    assert records(logs)[0]["value"] == "a\udcffb"


# The fixture that makes undeclared warnings failures (tests/conftest.py).


def test_undeclared_and_missing_warnings_are_problems():
    watch = DeclaredWarnings()
    watch("503 .* prefix")
    watch("slow", optional=True)
    watch.handle(
        logging.makeLogRecord({"msg": "retry", "levelno": logging.WARNING, "levelname": "WARNING", "name": "x"})
    )
    assert watch.problems() == ["undeclared: WARNING x: retry", "declared but not logged: 503 .* prefix"]
    watch.handle(logging.makeLogRecord({"msg": "503 on prefix", "levelno": logging.ERROR}))
    watch("retry")
    assert watch.problems() == []


def test_our_loggers_reach_the_fixture_with_their_facts(declared_warnings):
    declared_warnings("upload retried part=7")
    log.get("cachefs.flush").warning("upload retried", part=7)
    assert declared_warnings.records == ["WARNING cachefs.flush: upload retried part=7"]
