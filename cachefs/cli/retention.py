"""The commands that decide what a run keeps and names: gc and rollback. They need only the store."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import trio
import typer
from rich.progress import Progress as Bar
from rich.table import Table

from cachefs.cli import show
from cachefs.cli.bucket import OneRun, RunArgument, Workers, given_store, reading
from cachefs.cli.options import STORE_KEYS, ConfigFile, settings, with_config
from cachefs.cli.show import AsJson
from cachefs.errors import CachefsError, InvalidError, UnavailableError
from cachefs.formats.keys import Keys
from cachefs.gate import try_store
from cachefs.publish.promotion import Identity
from cachefs.publish.rollback import rollback as roll_back
from cachefs.publish.rules import Already
from cachefs.publish.writes import Writes
from cachefs.restore.listing import runs as list_runs
from cachefs.restore.patient import PatientReads
from cachefs.restore.reader import load_manifest, locate
from cachefs.restore.verify import verify as verify_manifest
from cachefs.retention.executor import Collected, Collector, patience
from cachefs.retention.plan import Candidate, Kept, Plan, Policy
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Inline

KEEP_KEYS = ("keep_last", "keep_hourly", "keep_daily", "gc_grace")


class RunReport(msgspec.Struct, frozen=True):
    """What `gc` prints of one run. `done` is False for a dry run, and when `error` kept the pass from its end."""

    run: str
    kept: tuple[Kept, ...] = ()
    retire: tuple[Candidate, ...] = ()
    young: tuple[Candidate, ...] = ()
    unknown: tuple[Candidate, ...] = ()
    waiting: tuple[str, ...] = ()
    deleted: int = 0
    freed_bytes: int = 0
    done: bool = False
    error: str = ""


@with_config((*STORE_KEYS, *KEEP_KEYS))
def gc(
    run: OneRun = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted; change nothing.")] = False,
    execute: Annotated[bool, typer.Option("--run", help="Delete it.")] = False,
    workers: Workers = 8,
    config: ConfigFile = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Delete the generations that nothing keeps, and what failed attempts have left. Asks for --dry-run or --run."""
    if dry_run == execute:
        raise InvalidError("give either --dry-run or --run", hint="--dry-run shows what --run would delete")
    store, keys = given_store(config, flags, workers)
    found = settings(config, flags)
    policy = Policy(**{name.removeprefix("gc_"): found[name] for name in KEEP_KEYS if name in found})
    if execute:
        _probe(store)
    names: list[str] | Iterator[str] = [run] if run is not None else (one.name for one in list_runs(store, keys))
    reports, errors = [], []
    with show.progress() as bar:
        for name in names:
            try:
                reports.append(_one(store, keys, name, policy, workers, bar if execute else None))
            except CachefsError as error:
                reports.append(RunReport(name, error=str(error)))
                errors.append(error)
    if as_json:
        show.json(reports)
    else:
        for report in reports:
            _show(report, execute)
    if errors:
        raise errors[0]


def _one(store: ObjectStore, keys: Keys, run: str, policy: Policy, workers: int, bar: Bar | None) -> RunReport:
    """Look at one run, or with a progress bar collect its garbage."""
    writes = Writes(store, keys, Inline(), patience)
    holder = f"cachefs gc on {socket.gethostname()}"
    if bar is None:
        return _planned(run, trio.run(Collector(writes, policy, holder=holder).preview, run))
    task = bar.add_task(f"gc {run}", total=None)
    progress = _advancing(bar, task)
    done: Collected = trio.run(
        Collector(writes, policy, holder=holder, workers=workers, progress=progress).collect, run
    )
    planned = _planned(run, done.plan)
    return msgspec.structs.replace(
        planned, waiting=done.waiting, deleted=done.deleted, freed_bytes=done.freed, done=True
    )


def _advancing(bar: Bar, task: Any) -> Callable[[int, int], None]:
    def advance(_objects: int, size: int) -> None:
        bar.advance(task, size)

    return advance


def _planned(run: str, plan: Plan) -> RunReport:
    return RunReport(run, plan.kept, plan.retire, plan.young, plan.unknown)


def _probe(store: ObjectStore) -> None:
    """Check that the store honours the conditions that a swap of the pointer relies on (I18)."""
    _, blocked = try_store(store)
    if blocked:
        raise UnavailableError(blocked, hint="nothing was changed; cachefs doctor shows every check")


def _show(report: RunReport, executed: bool) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("generation", "step", "attempt", "size", ""):
        table.add_column(column)
    for kept in report.kept:
        step = "" if kept.step is None else str(kept.step)
        show.row(table, kept.generation or "-", step, kept.attempt, show.size(kept.bytes), ", ".join(kept.reasons))
    goes = "deleted" if executed else "would be deleted"
    for group, note in (
        (report.retire, goes),
        (report.young, "too young"),
        (report.unknown, "left: older than the history of the pointer"),
    ):
        for one in group:
            read = ", when its reader has ended" if one.attempt in report.waiting else ""
            show.row(table, one.generation or "-", "", one.attempt, show.size(one.bytes), note + read)
    if report.error:
        show.console.print(f"{report.run}: {report.error}", highlight=False, markup=False)
        return
    if executed:
        text = f"{report.deleted} objects deleted, {show.size(report.freed_bytes)} freed"
    else:
        text = f"{len(report.retire)} attempts, {show.size(sum(one.bytes for one in report.retire))} would be deleted"
    show.console.print(f"{report.run}: {text}", highlight=False, markup=False)
    show.console.print(table)


@with_config(STORE_KEYS)
def rollback(
    run: RunArgument,
    generation: Annotated[str, typer.Argument(help="The generation to go back to; cachefs ls RUN shows them.")],
    *,
    attempt: Annotated[
        str | None, typer.Option("--attempt", help="Which save of that name; default: the newest.", show_default=False)
    ] = None,
    checksums_only: Annotated[
        bool,
        typer.Option(
            "--checksums-only", help="Compare what the store says; read no bytes of what it has a checksum of."
        ),
    ] = False,
    workers: Workers = 8,
    config: ConfigFile = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Publish an older generation of a run again, after checking all of it. Ends the saves that are under way."""
    store, keys = given_store(config, flags, workers)
    seen, target = locate(store, keys, run, generation, attempt)
    if seen.pointer.published is not None and seen.pointer.published.attempt == target.attempt:
        _already(run, generation, target.attempt, as_json)
        return
    _probe(store)
    with reading("rollback", store, keys, run, generation, target.attempt) as held:
        manifest = load_manifest(store, run, held.published)
        with show.progress() as bar:
            task = bar.add_task(f"verify {generation}", total=manifest.size)
            verify_manifest(
                PatientReads(store),
                manifest,
                "checksum" if checksums_only else "bytes",
                workers=workers,
                ranges=False,
                progress=lambda count: bar.advance(task, count),
            )
        who = Identity(f"rollback/{socket.gethostname()}/{os.getpid()}")
        writes = Writes(store, keys, Inline(), patience)
        done = trio.run(roll_back, writes, run, held.seen, held.published, who)
    if isinstance(done, Already):
        _already(run, generation, target.attempt, as_json)
        return
    left = done.left.generation if done.left else ""
    ended = [one.generation for one in done.ended]
    text = (
        f"{run}: back from {left} to {generation} (attempt {target.attempt}), all {len(manifest.shards)} shards there"
    )
    if ended:
        text += f"\nended, and never published: {', '.join(ended)}; later saves are published as usual"
    if done.now != done.pointer.published:
        text += f"\n{done.now.generation if done.now else 'nothing'} has been published since"
    facts = {
        "run": run,
        "generation": generation,
        "attempt": target.attempt,
        "changed": True,
        "left": left,
        "ended": ended,
        "seq": done.pointer.seq,
    }
    show.result(facts, text, as_json=as_json)


def _already(run: str, generation: str, attempt: str, as_json: bool) -> None:
    facts = {"run": run, "generation": generation, "attempt": attempt, "changed": False}
    show.result(facts, f"{run}: {generation} is what is published; nothing was changed", as_json=as_json)
