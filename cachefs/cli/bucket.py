"""The commands that need only the store, no mount and no daemon: ls, verify, restore."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cachefs.cli import show
from cachefs.cli.options import STORE_KEYS, ConfigFile, settings, with_config
from cachefs.cli.show import AsJson
from cachefs.errors import CorruptError, InvalidError
from cachefs.formats.keys import Keys
from cachefs.gate import check
from cachefs.restore.files import restore as restore_files
from cachefs.restore.leases import Held, leased
from cachefs.restore.listing import runs as list_runs
from cachefs.restore.patient import PatientReads
from cachefs.restore.reader import Entry, find, history, load_manifest
from cachefs.restore.verify import verify as verify_manifest
from cachefs.store.base import ObjectStore
from cachefs.store.open import open_store


def _run(name: str | None) -> str | None:
    """A shell completes a run, which is a directory in the mount, with a slash."""
    return (name.rstrip("/") or name) if name else name


RunArgument = Annotated[str, typer.Argument(help="The run: the directory path above the generations.", callback=_run)]
OneRun = Annotated[str | None, typer.Argument(help="One run; default: all runs.", show_default=False, callback=_run)]
Generation = Annotated[
    str | None, typer.Option("--generation", "-g", help="Instead of the newest one.", show_default=False)
]
Workers = Annotated[int, typer.Option("--workers", min=1, max=256, help="Shards read at the same time.")]


NoLease = Annotated[
    bool, typer.Option("--no-lease", help="Read without a lease: garbage collection may remove what is read.")
]


def given_store(config: Path | None, flags: dict[str, Any], workers: int = 8) -> tuple[ObjectStore, Keys]:
    """Return the store that the settings name, which is there and can be read, and its keys; nothing is changed in it.
    Raises InvalidError and the store's errors.
    """
    found = settings(config, flags)
    if "store" not in found:
        raise InvalidError("store is not set", hint="give --store, CACHEFS_STORE, or a --config file that names it")
    store = open_store(
        found["store"],
        endpoint_url=found.get("endpoint_url"),
        region=found.get("region"),
        connections=workers + 2,
    )
    check(store)
    return store, Keys(store.prefix)


@contextmanager
def reading(
    command: str,
    store: ObjectStore,
    keys: Keys,
    run: str,
    generation: str | None,
    attempt: str | None = None,
    *,
    lease: bool = True,
) -> Iterator[Held]:
    """Return a context in which a command reads a generation; it warns the user when there can be no lease. To an error
    that tells of damage it adds what else there is to read.
    """
    holder = f"cachefs {command} on {socket.gethostname()}"
    with leased(store, keys, run, generation, attempt, holder=holder, warn=show.warn, lease=lease) as held:
        try:
            yield held
        except CorruptError as error:
            error.hint = error.hint or (
                f"another generation may be whole (cachefs ls {run}): restore it with -g, or let cachefs rollback"
                " publish it again"
            )
            raise


@with_config(STORE_KEYS)
def ls(
    run: OneRun = None,
    *,
    config: ConfigFile = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """List the runs of a store, or the published generations of one run, newest first."""
    store, keys = given_store(config, flags)
    if run is None:
        _ls_runs(store, keys, as_json)
        return
    find(store, keys, run)  # says what is missing
    entries = list(history(store, keys, run))
    if as_json:
        show.json(entries)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("generation", "step", "attempt", "epoch", "seq", ""):
        table.add_column(column)
    for entry in entries:
        show.row(table, *_entry(entry))
    show.console.print(table)


def _entry(entry: Entry) -> tuple[str, ...]:
    published = entry.published
    gone = "removed" if entry.retired else ""
    return (published.generation, str(published.order.step), published.attempt, str(entry.epoch), str(entry.seq), gone)


def _ls_runs(store: ObjectStore, keys: Keys, as_json: bool) -> None:
    found = list(list_runs(store, keys))
    if as_json:
        show.json(found)
    elif not found:
        show.console.print(f"no runs in {store.url}", highlight=False, markup=False)
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("run", "published", "step", "epoch", "owner"):
            table.add_column(column)
        for one in found:
            if one.seen is None:
                show.row(table, one.name, f"unreadable: {one.error}", "", "", "")
                continue
            pointer = one.seen.pointer
            published = pointer.published
            names = (published.generation, str(published.order.step)) if published else ("-", "-")
            show.row(table, one.name, *names, str(pointer.epoch), pointer.owner)
        show.console.print(table)
    broken = [one for one in found if one.error]
    if broken:
        raise CorruptError(f"{len(broken)} of {len(found)} pointers cannot be read: {broken[0].error}")


@with_config(STORE_KEYS)
def verify(
    run: RunArgument,
    *,
    generation: Generation = None,
    checksums_only: Annotated[
        bool,
        typer.Option(
            "--checksums-only", help="Compare what the store says; read no bytes of what it has a checksum of."
        ),
    ] = False,
    workers: Workers = 8,
    no_lease: NoLease = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Read a published generation's pinned versions back and hash them again."""
    store, keys = given_store(config, flags, workers)
    with reading("verify", store, keys, run, generation, lease=not no_lease) as held, show.progress() as bar:
        manifest = load_manifest(store, run, held.published)
        task = bar.add_task(f"verify {manifest.generation}", total=manifest.size)
        level = "checksum" if checksums_only else "bytes"
        done = verify_manifest(
            PatientReads(store),
            manifest,
            level,  # type: ignore[arg-type]
            workers=workers,
            ranges=False,
            progress=lambda count: bar.advance(task, count),
        )
    found = "all as promised"
    if checksums_only:
        found = f"checksums as recorded; {done.read or 'no'} bytes were read"
    show.result(
        {"run": run, "generation": manifest.generation, "level": level, "shards": done.shards, "bytes": done.bytes},
        f"{run}/{manifest.generation}: {done.shards} shards, {done.bytes} bytes, {found}",
        as_json=as_json,
    )


@with_config(STORE_KEYS)
def restore(
    run: RunArgument,
    directory: Annotated[Path, typer.Argument(help="Where the generation is put, under its own name.")],
    *,
    generation: Generation = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing directory or file.")] = False,
    workers: Workers = 8,
    no_lease: NoLease = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Restore a published generation into DIRECTORY, verified; all of it or nothing."""
    store, keys = given_store(config, flags, workers)
    with reading("restore", store, keys, run, generation, lease=not no_lease) as held, show.progress() as bar:
        manifest = load_manifest(store, run, held.published)
        task = bar.add_task(f"restore {manifest.generation}", total=manifest.size)
        done = restore_files(
            PatientReads(store),
            manifest,
            directory,
            replace=replace,
            workers=workers,
            ranges=False,
            progress=lambda count: bar.advance(task, count),
        )
    text = f"{done.path}: {done.shards} shards, {done.bytes} bytes"
    if done.skipped_xattrs:
        text += f"\nattributes not supported here: {', '.join(done.skipped_xattrs)}"
    found = {"path": str(done.path), "shards": done.shards, "bytes": done.bytes, "skipped_xattrs": done.skipped_xattrs}
    show.result(found, text, as_json=as_json)
