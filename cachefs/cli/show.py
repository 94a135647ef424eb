"""How results look in a terminal."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cachefs.status import Flushed, GenerationStatus, Status

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 500)
"""Where results go; a pipe or file gets long lines whole."""
_progress = Console(stderr=True)
_FIRST = 5
"""How many of many paths are named."""
_COLOURS = {"published": "green", "abandoned": "red", "fenced": "red", "open": "dim"}


def pause(seconds: float) -> None:
    """Wait between two looks at something that changes by itself."""
    time.sleep(seconds)


def size(count: float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(seconds: float) -> str:
    """Return a duration as people read it."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}m{seconds % 60:02.0f}s"
    return f"{seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}m"


def json(value: object) -> None:
    """Print a value as JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def warn(text: str) -> None:
    """Tell the user what does not stop the command."""
    sys.stderr.write(f"cachefs: {text}\n")


def result(value: object, text: str, *, as_json: bool) -> None:
    """Print what a command has found or done, for programs or for people."""
    if as_json:
        json(value)
    else:
        console.print(text, highlight=False, markup=False)


def row(table: Table, *cells: RenderableType) -> None:
    """Add a row of plain text: names may hold what looks like markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def progress() -> Progress:
    """Return a progress display for bytes, on a terminal only."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=_progress, disable=not _progress.is_terminal)


def status(status: Status, *, watched: bool = False) -> RenderableType:
    """Lay a status out. `watched`: what is new comes first, for a screen shows no more than its height."""
    head = Table.grid(padding=(0, 2))
    rows = [
        ("mount", f"{status.mountpoint}  (pid {status.pid}, data path {status.data_path})"),
        ("store", f"{status.store}  ({status.store_health})"),
        ("staging", f"{status.staging}  ({size(status.staging_free_bytes)} free)"),
        ("backlog", f"{size(status.backlog_bytes)} in {status.backlog_files} files"),
        ("oldest unpublished", age(status.oldest_unpublished_age) if status.oldest_unpublished_age else "-"),
        ("loose files waiting", str(status.loose_pending)),
    ]
    if status.member_count > 1 or not status.owner:
        others = ", ".join(status.members) or str(status.member_count)
        rows.append(("members", f"{others}  (this is {status.member}{', the owner' if status.owner else ''})"))
    for run in (run for run in status.runs if run.fenced_by or not watched):
        fenced = f"  FENCED by {run.fenced_by}" if run.fenced_by else ""
        rows.append(("run", f"{run.run}  epoch {run.epoch or '-'}{fenced}"))
    rows.extend(("PROBLEM", f"{one.run or 'search for runs'}: {one.error}") for one in status.problems)
    if status.publishing_blocked:
        rows.append(("NOT PUBLISHING", status.publishing_blocked))
    for name, text in rows:
        row(head, name, text)
    known = status.generations[::-1] if watched else status.generations
    return Group(head, "", generations(known)) if known else head


def flushed(done: Flushed) -> str:
    """Say what a flush has found: nothing that is pending, but perhaps saves that are lost or not complete."""
    text = f"nothing is pending; {done.published} generations published"
    if done.abandoned:
        text += f", {done.abandoned} abandoned"
    if done.open:
        lines = [f"  {path}, waiting: {waiting}" for path, waiting in list(done.open.items())[:_FIRST]]
        more = [f"  and {len(done.open) - _FIRST} more"] if len(done.open) > _FIRST else []
        text = "\n".join([f"{text}; {len(done.open)} not complete, so not published:", *lines, *more])
    if done.lost:
        lines = [f"  {path}: {reason}" for path, reason in done.lost.items()]
        text = "\n".join([text, f"ABANDONED meanwhile, {len(done.lost)} complete, and not published:", *lines])
    return text


def generations(known: tuple[GenerationStatus, ...]) -> Table:
    """Lay the generations out, with a bar for what is being flushed."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("generation", "step", "state", "flushed", "", "age", "note"):
        table.add_column(column, overflow="fold")
    for one in known:
        bar: RenderableType = ""
        if one.bytes > 0 and one.bytes_flushed < one.bytes:
            bar = ProgressBar(total=one.bytes, completed=one.bytes_flushed, width=20)
        note = one.error or (one.waiting if one.state == "open" else "")
        colour = _COLOURS.get(one.state.value, "yellow")
        row(
            table,
            one.path,
            str(one.step),
            Text(one.state.value, colour),
            f"{size(one.bytes_flushed)}/{size(one.bytes)}",
            bar,
            age(one.age),
            note,
        )
    return table
