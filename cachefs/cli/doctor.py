"""`cachefs doctor`: look at everything a mount needs, and say what to do about what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from cachefs import gate
from cachefs.cli import show
from cachefs.cli.options import ConfigFile, settings, with_config
from cachefs.cli.show import AsJson
from cachefs.errors import CachefsError, MountpointError, ProbeError, StagingError
from cachefs.mount import kernel
from cachefs.store.open import open_store
from cachefs.store.probe import Outcome, probe

NO_PUBLISH = "mount with --no-publish to keep everything local, or choose a store that honours conditional writes"


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. `error` is the error a mount would stop with, None when all is well."""

    what: str
    text: str
    error: CachefsError | None = None


@with_config(("mountpoint", "store", "staging", "endpoint_url", "region"))
def doctor(*, config: ConfigFile = None, as_json: AsJson = False, flags: dict[str, Any]) -> None:
    """Check FUSE, and as far as they are given: mountpoint, staging disk, store (with the full probe)."""
    found = settings(config, flags)
    findings = list(_look(found))
    if as_json:
        show.json([{"what": one.what, "ok": not one.error, "text": one.text, "hint": _hint(one)} for one in findings])
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            mark = Text("fail", "red") if finding.error else Text("ok", "green")
            show.row(table, mark, finding.what, finding.text)
        show.console.print(table)
    for finding in findings:
        if finding.error:
            raise finding.error


def _hint(finding: Finding) -> str:
    return finding.error.hint if finding.error else ""


def _look(found: dict[str, Any]) -> Iterator[Finding]:
    yield Finding("system", f"Linux {platform.release()}, Python {platform.python_version()}")
    yield _fuse()
    yield _data_path()
    yield _allow_other()
    if "mountpoint" in found:
        yield _mountpoint(found["mountpoint"])
    if "staging" in found:
        yield _staging(found["staging"])
    if "store" in found:
        yield from _store(found)


def _fuse() -> Finding:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return Finding("fuse", "/dev/fuse cannot be opened", CachefsError("no FUSE", hint="modprobe fuse"))
    if shutil.which("fusermount3") is None:
        return Finding(
            "fuse", "fusermount3 is missing", CachefsError("fusermount3 is missing", hint="apt-get install fuse3")
        )
    return Finding("fuse", "/dev/fuse can be opened, fusermount3 is there")


def _data_path() -> Finding:
    """Say who would move the bytes of reads and writes; both ways are sound, so neither is an error."""
    obstacle = kernel.obstacle()
    return Finding("data path", f"python: {obstacle}" if obstacle else "kernel: passthrough can be used")


def _allow_other() -> Finding:
    if os.geteuid() == 0:
        return Finding("other users", "root: --allow-other is on by default")
    try:
        allowed = "user_allow_other" in [line.strip() for line in Path("/etc/fuse.conf").read_text().splitlines()]
    except OSError:
        allowed = False
    text = "user_allow_other is set" if allowed else "only this user sees the mount (user_allow_other is not set)"
    return Finding("other users", text)


def _mountpoint(path: Path) -> Finding:
    from cachefs.mount import session  # takes a while to import, and no other command needs it

    if session.mounted_type(path) == session.TYPE and not session.is_stale(path):
        pid = session.served_by(path)
        return Finding("mountpoint", f"{path} is served by cachefs" + (f" (pid {pid})" if pid else ""))
    try:
        stale = session.check(path)
    except MountpointError as error:
        return Finding("mountpoint", str(error), error)
    if stale:
        text = f"the daemon that served {path} is gone"
        hint = "start it again with the same arguments: it takes the dead mount away, and goes on"
        return Finding("mountpoint", text, MountpointError(text, hint=hint))
    return Finding("mountpoint", f"{path} is empty" if path.exists() else f"{path} is made at the start")


def _staging(path: Path) -> Finding:
    place = path
    while not place.exists():
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        text = f"nothing can be written at {place}: {error.strerror}"
        return Finding("staging", text, StagingError(text, hint="choose a directory on a local disk"))
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize
    return Finding("staging", f"{show.size(free)} free at {place}")


def _store(found: dict[str, Any]) -> Iterator[Finding]:
    try:
        store = open_store(found["store"], endpoint_url=found.get("endpoint_url"), region=found.get("region"))
        gate.check(store, writes=True)
    except CachefsError as error:
        yield Finding("store", str(error), error)
        return
    yield Finding("store", f"{store.url} answers")
    report = probe(store)
    for check in report.checks:
        bad = check.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)
        problem = ProbeError(f"{check.id}: {check.meaning}", hint=NO_PUBLISH) if bad else None
        yield Finding(f"probe {check.id}", f"{check.outcome.value}: {check.meaning}", problem)
