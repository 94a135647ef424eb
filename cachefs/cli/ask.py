"""The commands that ask a running daemon: status, wait, close, flush."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.live import Live

from cachefs import control
from cachefs.cli import show
from cachefs.cli.show import AsJson
from cachefs.config.load import given
from cachefs.errors import CachefsError, InvalidError, WaitTimeout
from cachefs.formats.names import to_text
from cachefs.formats.records import State
from cachefs.status import Flushed, Status, lost

Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds to wait at most.", show_default=False)]
TELL = 5.0
"""Seconds after which a wait says what it waits for."""
REFRESH = 1.0
"""Seconds between two looks of `status --watch`."""


def status(
    mountpoint: Annotated[Path | None, typer.Argument(help="The mount, or a path in it.", show_default=False)] = None,
    *,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, with progress bars, until interrupted.")] = False,
) -> None:
    """Show what the daemon knows: every generation's state, the backlog, the store's health."""
    socket, _ = control.find(_mountpoint(mountpoint))
    if as_json:
        show.json(_status(socket))
        return
    if not watch:
        show.console.print(show.status(_status(socket)))
        return
    with Live(show.status(_status(socket), watched=True), console=show.console, auto_refresh=False) as live:
        while True:
            show.pause(REFRESH)
            live.update(show.status(_status(socket), watched=True), refresh=True)


def _status(socket: Path) -> Status:
    return msgspec.convert(control.ask(socket, control.StatusRequest()), Status)


def wait(
    path: Annotated[Path, typer.Argument(help="A generation, or a file in it; it need not exist any more.")],
    *,
    state: Annotated[str, typer.Option(help="open, staged, flushed, sealed, tested or published.")] = "published",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Return when the newest save of PATH has reached a state: is this checkpoint safe yet?"""
    if state not in {one.value for one in State if one.rank >= 0}:
        raise InvalidError(f"unknown state {state!r}", hint="open, staged, flushed, sealed, tested or published")
    socket, inside = _inside(path)
    reached = _patiently(socket, control.WaitRequest(inside, State(state), timeout))
    show.result({"path": inside, "state": reached}, f"{inside}: {reached}", as_json=as_json)


def close(
    path: Annotated[Path, typer.Argument(help="The generation's directory or file.")], *, as_json: AsJson = False
) -> None:
    """Say that a save is complete, for code that no preset knows."""
    socket, inside = _inside(path)
    attempt = control.ask(socket, control.CloseRequest(inside))
    show.result({"path": inside, "attempt": attempt}, f"{inside}: closed (attempt {attempt})", as_json=as_json)


def flush(
    mountpoint: Annotated[Path | None, typer.Argument(help="The mount, or a path in it.", show_default=False)] = None,
    *,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Return when everything that is complete is published; say what stays open. Fails if a complete save was abandoned
    meanwhile.
    """
    socket, _ = control.find(_mountpoint(mountpoint))
    before = _status(socket)
    try:
        flushed = msgspec.convert(_patiently(socket, control.FlushRequest(timeout)), Flushed)
    except control.DaemonError:  # the next flush would take them for old ones
        for path, reason in lost(before, _status(socket)).items():
            show.warn(f"{path} was abandoned meanwhile: {reason}")
        raise
    flushed = msgspec.structs.replace(flushed, lost=lost(before, _status(socket)))
    show.result(flushed, show.flushed(flushed), as_json=as_json)
    if flushed.lost:
        raise CachefsError(
            f"{len(flushed.lost)} complete saves were abandoned meanwhile ({next(iter(flushed.lost))}): they are not"
            " published",
            hint="what is left of them is in the mount; cachefs status says why",
        )


def _patiently(socket: Path, request: control.WaitRequest | control.FlushRequest) -> Any:
    """Ask for something that may take long; after TELL seconds say once, on stderr, what it waits for."""
    left = request.timeout
    if left is None or left > TELL:
        try:
            return control.ask(socket, msgspec.structs.replace(request, timeout=TELL))
        except control.DaemonError as error:
            if error.exit_code != WaitTimeout.exit_code:
                raise
            show.warn(f"{error}: {error.hint}" if error.hint else str(error))
        left = None if left is None else left - TELL
    return control.ask(socket, msgspec.structs.replace(request, timeout=left))


def _mountpoint(given_path: Path | None) -> Path:
    if given_path is None:
        found = given(None, os.environ, {}).get("mountpoint")
        given_path = found if isinstance(found, Path) else Path.cwd()
    return given_path


def _inside(path: Path) -> tuple[Path, str]:
    socket, mountpoint = control.find(path)
    inside = os.path.relpath(os.path.realpath(path), mountpoint)  # what a link like `latest` names is meant
    if inside == ".":
        raise InvalidError(f"{path} is the mountpoint itself", hint="name a generation below it")
    return socket, to_text(os.fsencode(inside))
