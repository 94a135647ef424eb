"""The commands gc, rollback, restore, verify and ls on a store in a directory, without a mount."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cachefs.cli.main import app
from cachefs.config.schema import KEYS
from cachefs.errors import CachefsError, DeniedError
from cachefs.retention.plan import Policy
from cachefs.store.directory import DirectoryStore
from tests.retention.world import World

LEAST = ("--keep-last", "1", "--keep-hourly", "0", "--keep-daily", "0", "--gc-grace", "0")


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "store").mkdir()
    store = DirectoryStore(str(tmp_path / "store"))
    store.prepare()
    return World(store)


@pytest.fixture
def cachefs(world: World) -> Callable[..., Any]:
    """Run a command; return what it printed, as JSON with --json. With `code` it must fail so; return its error."""

    def run(*arguments: str | Path, code: int = 0) -> Any:
        result = CliRunner().invoke(app, [*map(str, arguments), "--store", world.inner.url])
        if code:
            assert isinstance(result.exception, CachefsError), result.output
            assert result.exception.exit_code == code
            return result.exception
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout) if "--json" in arguments else result.output

    return run


# gc


def test_gc_shows_and_then_does(world: World, cachefs: Any) -> None:
    old = world.saves(1, 2, 3, 4, every=0)
    [shown] = cachefs("gc", world.run, "--dry-run", "--json", *LEAST)
    assert [one["generation"] for one in shown["kept"]] == ["step-4", "step-3"]
    assert [one["generation"] for one in shown["retire"]] == ["step-1", "step-2"]
    assert (shown["done"], shown["deleted"]) == (False, 0)
    assert len(world.attempts()) == 4
    [done] = cachefs("gc", world.run, "--run", "--json", *LEAST)
    assert (done["retire"], done["deleted"], done["done"]) == (shown["retire"], 8, True)
    assert done["freed_bytes"] == sum(one["bytes"] for one in shown["retire"])
    assert world.attempts() == set(old[2:])
    assert cachefs("gc", "--run", "--json", *LEAST)[0]["retire"] == []


def test_gc_for_people(world: World, cachefs: Any) -> None:
    world.saves(1, 2, 3, every=0)
    world.open(4)
    text = cachefs("gc", "--dry-run", *LEAST)
    assert f"{world.run}: 1 attempts, " in text
    rows = {line.split()[0]: line.rstrip() for line in text.splitlines()[2:]}
    assert "published, one of the last 1" in rows["step-3"]
    assert "published before" in rows["step-2"]
    assert rows["step-1"].endswith("would be deleted")
    assert rows["step-4"].endswith("open")
    assert f"{world.run}: 4 objects deleted, " in cachefs("gc", "--run", *LEAST)


def test_gc_keeps_what_the_defaults_keep(world: World, cachefs: Any) -> None:
    world.saves(1, 2, 3, 4, 5, every=0)
    [shown] = cachefs("gc", "--dry-run", "--json")
    assert [one["generation"] for one in shown["kept"]] == ["step-5", "step-4", "step-3"]
    assert [one["generation"] for one in shown["young"]] == ["step-1", "step-2"]
    fields = {name: KEYS[name].default.strip("`") for name in ("keep_last", "keep_hourly", "keep_daily", "gc_grace")}
    made = Policy()
    assert list(fields.values()) == [
        str(made.keep_last), str(made.keep_hourly), str(made.keep_daily), f"{made.grace:g}s",
    ]  # fmt: skip
    assert KEYS["gc"].default == "`false`"


def test_gc_asks_what_it_shall_do(cachefs: Any, world: World) -> None:
    for flags in ((), ("--run", "--dry-run")):
        assert "either --dry-run or --run" in str(cachefs("gc", *flags, code=2))
    assert "no run 'nothing'" in str(cachefs("gc", "nothing", "--dry-run", code=66))


def test_gc_goes_on_with_the_other_runs(world: World, cachefs: Any) -> None:
    """A run that cannot be read is left alone and named; the exit code says so."""
    world.saves(1, 2, 3, every=0)
    other = World(world.inner, run="exp/b")
    other.saves(1, 2, 3, every=0)
    world.inner.put(world.keys.pointer(world.run), b"{}", condition=None)
    before = world.objects()
    assert "the pointer of run 'exp/a'" in str(cachefs("gc", "--run", *LEAST, code=65))
    assert len(other.attempts()) == 2
    assert world.objects() == before


# rollback


def test_rollback(world: World, cachefs: Any) -> None:
    first, second, _ = (world.save(step) for step in (1, 2, 3))
    world.open(4, "under way")
    done = cachefs("rollback", world.run, "step-1", "--json")
    assert (done["changed"], done["left"], done["ended"]) == (True, "step-3", ["step-4"])
    pointer = world.pointer
    assert (pointer.kind, pointer.published, pointer.open) == ("rollback", first, ())
    assert (pointer.epoch, pointer.owner, pointer.seq) == (1, "n1/x", done["seq"])
    assert pointer.rollback_of is not None
    again = cachefs("rollback", world.run, "step-1", "--json")
    assert again == {"run": world.run, "generation": "step-1", "attempt": first.attempt, "changed": False}
    assert world.pointer == pointer
    assert "nothing was changed" in cachefs("rollback", world.run, "step-1")
    text = cachefs("rollback", world.run, "step-2", "--checksums-only")
    assert f"back from step-1 to step-2 (attempt {second.attempt})" in text
    assert world.objects("leases/") == set()
    world.save(3)
    assert world.pointer.published is not None
    assert world.pointer.published.generation == "step-3"


def test_rollback_chooses_among_saves_of_one_name(world: World, cachefs: Any) -> None:
    first, again = world.save(1, "first"), world.save(1, "again", ordinal=2)
    world.save(2)
    cachefs("rollback", world.run, "step-1", "--attempt", "first")
    assert world.pointer.published == first
    cachefs("rollback", world.run, "step-1")
    assert world.pointer.published == first, "it is the newest of that name that was published"
    cachefs("rollback", world.run, "step-1", "--attempt", "again")
    assert world.pointer.published == again
    assert "of attempt nobody" in str(cachefs("rollback", world.run, "step-1", "--attempt", "nobody", code=66))


@pytest.mark.parametrize("level", ["bytes", "checksum"])
def test_rollback_refuses_what_is_damaged(world: World, cachefs: Any, level: str) -> None:
    first = world.save(1)
    world.save(2)
    key = next(key for key, _ in world.objects(f"attempts/{first.attempt}/shards"))
    [(_, version)] = [one for one in world.objects() if one[0] == key]
    if level == "checksum":
        world.inner.delete_version(key, version)
    else:
        [path] = Path(world.inner.url.removeprefix("file://")).rglob(version)
        path.chmod(0o644)
        path.write_bytes(b"x" * path.stat().st_size)
    flags = ["--checksums-only"] if level == "checksum" else []
    cachefs("rollback", world.run, "step-1", *flags, code=65)
    assert world.pointer.kind == "promote"
    assert world.objects("leases/") == set()


def test_rollback_to_what_is_not_there(world: World, cachefs: Any) -> None:
    world.saves(1, 2, 3, every=0)
    cachefs("gc", "--run", *LEAST)
    assert "any more: garbage collection has removed it" in str(cachefs("rollback", world.run, "step-1", code=66))
    assert "no published generation 'step-9'" in str(cachefs("rollback", world.run, "step-9", code=66))
    cachefs("rollback", "nothing", "step-1", code=66)


# readers


def test_removed_generations_are_shown_as_removed(world: World, cachefs: Any) -> None:
    world.saves(1, 2, 3, every=0)
    cachefs("gc", "--run", *LEAST)
    shown = [(one["published"]["generation"], one["retired"]) for one in cachefs("ls", world.run, "--json")]
    assert shown == [("step-3", False), ("step-2", False), ("step-1", True)]
    lines = [line.split() for line in cachefs("ls", world.run).splitlines()[1:]]
    assert [line[0] for line in lines if line[-1] == "removed"] == ["step-1"]
    cachefs("verify", world.run, "-g", "step-1", code=66)


class Watching(DirectoryStore):
    """Looks at the leases whenever a shard is read; may refuse to create them."""

    def __init__(self, root: str, world: World, *, denies: bool = False) -> None:
        super().__init__(root)
        self.world = world
        self.denies = denies
        self.leases: list[int] = []

    def get_stream(self, key: str, version_id: str) -> Any:
        if "/shards/" in key:
            self.leases.append(len(self.world.objects("leases/")))
        return super().get_stream(key, version_id)

    def put(self, key: str, body: Any, **given: Any) -> Any:
        if self.denies:
            raise DeniedError(f"{key}: read only")
        return super().put(key, body, **given)


@pytest.fixture
def watched(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watching]:
    def watch(**given: Any) -> Watching:
        store = Watching(world.inner.url.removeprefix("file://"), world, **given)
        monkeypatch.setattr("cachefs.cli.bucket.open_store", lambda *args, **settings: store)
        return store

    return watch


@pytest.mark.parametrize("command", ["restore", "verify"])
def test_readers_hold_a_lease_while_they_read(
    world: World, cachefs: Any, watched: Any, tmp_path: Path, command: str
) -> None:
    world.saves(1, 2, every=0)
    store = watched()
    arguments = [command, world.run, *([tmp_path / "out"] if command == "restore" else []), "-g", "step-1"]
    cachefs(*arguments)
    assert store.leases == [1, 1]
    assert world.objects("leases/") == set()
    watched_again = watched()
    if command == "restore":
        arguments.append("--replace")
    cachefs(*arguments, "--no-lease")
    assert watched_again.leases == [0, 0]


def test_a_reader_without_the_right_to_write_is_warned(world: World, cachefs: Any, watched: Any) -> None:
    world.saves(1, every=0)
    store = watched(denies=True)
    text = cachefs("verify", world.run)
    assert "no lease: garbage collection may remove what is read here" in text
    assert "all as promised" in text
    assert store.leases == [0, 0]
    assert "no lease" not in cachefs("verify", world.run, "--no-lease")
