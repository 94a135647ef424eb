"""Short ways to make journal records."""

from __future__ import annotations

from typing import Any

from cachefs.formats.records import AttemptRecord, Identity, RunRecord, ShardRecord, State


def attempt(name: str = "a1", *, run: str = "run", serial: int = 1, **changes: Any) -> AttemptRecord:
    """Return an announced, closed, staged attempt."""
    fields: dict[str, Any] = {
        "state": State.STAGED,
        "closed_at": 1.0,
        "staged_at": 1.0,
        "opened_epoch": 1,
        "ordinal": 1,
        **changes,
    }
    return AttemptRecord(
        attempt=name,
        path=f"{run}/{name}",
        run=run,
        generation=name,
        kind="directory",
        preset="auto",
        step=serial,
        opened_at=0.0,
        serial=serial,
        **fields,
    )


def shard(name: str = "s1", *, of: str = "a1", path: str = "", size: int = 1, **changes: Any) -> ShardRecord:
    return ShardRecord(
        attempt=of,
        shard=name,
        paths=(path or name,),
        identity=Identity(1, size, 1),
        mode=0o644,
        key=f"runs/run/attempts/{of}/shards/node/{name}",
        **changes,
    )


def run(name: str = "run", **changes: Any) -> RunRecord:
    return RunRecord(run=name, epoch=1, owner="me", **changes)
