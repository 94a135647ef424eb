"""`cachefs mount`: run the daemon, in the foreground or in the background."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated, Any, TextIO

import typer

from cachefs import log
from cachefs.cli.options import ConfigFile, complete, with_config
from cachefs.errors import CachefsError


@with_config()
def mount(
    *,
    config: ConfigFile = None,
    background: Annotated[bool, typer.Option("--daemon", help="Return as soon as the mount serves.")] = False,
    log_file: Annotated[str, typer.Option(help="With --daemon: append the log to this file.")] = "/dev/null",
    flags: dict[str, Any],
) -> None:
    """Mount MOUNTPOINT and publish the checkpoints that are written there."""
    from cachefs import daemon  # takes a while to import, and no other command needs it

    settings = complete(config, flags)
    ready, log_fd = None, sys.stderr.fileno()
    if background:
        target, parent = _detach(os.path.abspath(log_file))
        log.configure(settings.log_level, settings.log_format, stream=target)
        ready, log_fd = partial(_ready, target, parent), target.fileno()
    else:
        log.configure(settings.log_level, settings.log_format)
    raise typer.Exit(daemon.run(settings, ready=ready, log_fd=log_fd))


def _detach(log_file: str) -> tuple[TextIO, int]:
    """Fork; the parent waits until the child serves or fails, and exits with its exit code.

    Return the open log file, and the descriptor by which `_ready` tells the parent. Errors of the start still go to the
    terminal.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            served = stream.read(1) == b"1"
        os._exit(0 if served else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.close(reader)
    os.setsid()
    os.chdir("/")  # the directory it was started in may go
    try:
        target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise CachefsError(f"cannot write the log file {log_file}: {error.strerror}") from error
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(target, 1)
    return os.fdopen(target, "w", buffering=1), writer


def _ready(target: TextIO, parent: int) -> None:
    sys.stderr.flush()
    os.dup2(target.fileno(), 2)
    os.write(parent, b"1")
    os.close(parent)
