"""Logging: an event in plain words and its facts as key=value, from our code and from libraries, through one handler.

    log = get(__name__)
    with context(run=run, generation=generation):
        log.info("published", seconds=12.3)

Text for people and for journald (priority prefix `<N>`, no time stamp of our own), JSON for everything else. Secrets
never pass: values under telling names, credentials in URLs, request signatures, and the AWS secrets of the environment.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.contextvars import bound_contextvars as context
from structlog.typing import EventDict, Processor

from cachefs import clock
from cachefs.formats.names import to_text

__all__ = ["bridge", "configure", "context", "get", "redacted"]

_SECRET_NAME: Final = re.compile(r"secret|passw|token|authorization|credential|private.?key|signature", re.IGNORECASE)
_SECRET_TEXT: Final = re.compile(
    r"(?P<head>"
    r"://(?=[^\s/@]+@)"  # user and password of a URL
    r"|(?:x-amz-(?:signature|security-token|credential)|(?<![a-z])(?:signature|credential))=(?=[^\s&])"
    r"|(?:x-amz-security-token|authorization)['\"\\]*\s*[:=]\s*(?:b?\\?['\"])?"  # a header, also as printed in a dict
    r"(?:(?:basic|bearer|aws4-hmac-sha256)\s+)?"
    r")(?P<secret>(?<=://)[^\s/@]+|[^\s&\"',;\\]+)",
    re.IGNORECASE,
)
_SECRET_VARIABLES: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_QUIET_LIBRARIES: Final = ("boto3", "botocore", "s3transfer", "urllib3")
"""Their INFO and DEBUG are one line and more per request, with headers and signatures."""
_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


def get(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module. It may be made at import time, before `configure`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bridge() -> None:
    """Hand the records of our loggers to the standard library's logging, in which every other library logs too."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_COMMON,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def configure(
    level: str = "info",
    format: Literal["auto", "json", "text"] = "auto",
    *,
    stream: TextIO | None = None,
    env: Mapping[str, str] = os.environ,
) -> None:
    """Send every record of at least `level` to `stream` (stderr). Once per process; a later call replaces it."""
    out = sys.stderr if stream is None else stream
    journald = _is_journal(out, env.get("JOURNAL_STREAM", ""))
    text = format == "text" or (format == "auto" and (journald or out.isatty()))
    hidden = tuple(value for name in _SECRET_VARIABLES if len(value := env.get(name, "")) >= 8)
    bridge()
    handler = _Handler(out)
    handler.setFormatter(_Formatter(_text_renderer(journald) if text else _render_json, hidden, journald))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for library in _QUIET_LIBRARIES:
        logging.getLogger(library).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


def redacted(text: str, hidden: tuple[str, ...] = ()) -> str:
    """Return `text` without credentials: those of URLs, of signed requests, and the literal values in `hidden`."""
    for value in hidden:
        text = text.replace(value, "***")
    return _SECRET_TEXT.sub(r"\g<head>***", text)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that a second `configure` finds it."""


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """Renders a record, then hides secrets in the finished text, so that no key, argument or traceback escapes it."""

    def __init__(self, renderer: Processor, hidden: tuple[str, ...], journald: bool) -> None:
        super().__init__(
            foreign_pre_chain=_COMMON,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
        self.hidden = hidden
        self.journald = journald

    def format(self, record: logging.LogRecord) -> str:
        text = redacted(super().format(record), self.hidden).encode(errors="backslashreplace").decode()
        if not self.journald:
            return text
        # journald makes one entry of each line, so each needs its priority.
        prefix = next((f"<{number}>" for level, number in _PRIORITIES if record.levelno >= level), "<7>")
        return "\n".join(prefix + line for line in text.splitlines())


def _is_journal(stream: TextIO, journal: str) -> bool:
    """Return whether `stream` is the one that JOURNAL_STREAM (device:inode) speaks of; a redirected one is not."""
    try:
        stat = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return journal == f"{stat.st_dev}:{stat.st_ino}"


def _add_time(_logger: object, _method: str, event: EventDict) -> EventDict:
    event["time"] = datetime.fromtimestamp(clock.now(), UTC).isoformat(timespec="milliseconds")
    return event


def _plain(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Hide values under telling names; turn byte paths into their text form, errors and others into their `str`."""
    for key, value in event.items():
        if key.startswith("_"):
            continue
        if _SECRET_NAME.search(key):
            event[key] = "***"
        elif isinstance(value, bytes):
            event[key] = to_text(value)
        elif not isinstance(value, str | int | float | bool | None):
            event[key] = str(value)
    return event


def _render_json(_logger: object, _method: str, event: EventDict) -> str:
    first = {key: event.pop(key) for key in ("time", "level", "event")}
    return json.dumps(first | dict(event), ensure_ascii=False)


def _text_renderer(journald: bool) -> Callable[[object, str, MutableMapping[str, Any]], str]:
    def render(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
        time, level, name = event.pop("time"), event.pop("level"), event.pop("logger", "")
        message, exception = str(event.pop("event")), event.pop("exception", "")
        facts = "".join(f" {key}={_quoted(value)}" for key, value in event.items())
        source = "" if name.startswith("cachefs") else f" logger={_quoted(name)}"
        head = "" if journald else f"{time} {level:<7} "
        return f"{head}{_one_line(message)}{facts}{source}" + (f"\n{exception}" if exception else "")

    return render


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(" =\"'")
    return text if plain else json.dumps(text, ensure_ascii=False)


_COMMON: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.PositionalArgumentsFormatter(),
    _add_time,
    structlog.processors.format_exc_info,
    _plain,
)
"""What every record goes through, ours and those of libraries."""
