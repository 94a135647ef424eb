"""Files that change, move, vanish or are never finished while their saves are on the way."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from integration.bucket import Bucket
from integration.node import PATIENCE, await_condition
from integration.proxy import Hold
from integration.world import (
    MIB,
    PART,
    SHARD,
    World,
    assert_same,
    assert_written_once,
    attempts,
    await_state,
    history,
    index,
    save,
    states,
    tensors,
    write,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]
OLD, NEW = tensors(2 * PART + MIB, "old"), tensors(2 * PART + MIB, "new")
NAME = "m.safetensors"


class Then(Bucket):
    """A bucket as it was while the run's pointer was this one."""

    def __init__(self, bucket: Bucket, pointer: dict[str, Any]) -> None:
        super().__init__(bucket.client, bucket.bucket, bucket.prefix.rstrip("/"))
        self._pointer = pointer

    def pointer(self, run: str) -> dict[str, Any]:
        return self._pointer


def published(world: World, run: str = "run") -> list[dict[str, bytes]]:
    """Return the files of everything a run has published, in order, read by pinned versions."""
    promoted = [pointer for pointer in history(world.bucket, run) if pointer["kind"] == "promote"]
    return [Then(world.bucket, pointer).files(run) for pointer in promoted]


def held_upload(world: World, path: Path, data: bytes) -> Hold:
    """Write a file, and stop its upload in the middle."""
    hold = Hold()
    world.proxy.on("UploadPart", hold, key=SHARD, where=lambda request: request.part == 2)
    write(path, data)
    hold.arrived()
    return hold


@pytest.mark.parametrize("still_open", [False, True], ids=["closed", "descriptor open across the rename"])
def test_a_new_file_renamed_over_one_that_is_being_sent(world: World, still_open: bool) -> None:
    """Write x.tmp, sync, rename over x while the old x is sent: x is the new bytes, and each save is whole."""
    one = world.node()
    path = one.mnt / "run" / NAME
    hold = held_upload(world, path, OLD)
    temporary = path.with_name(f"{NAME}.tmp")
    with temporary.open("wb") as file:
        file.write(NEW[:-10])
        file.flush()
        os.fsync(file.fileno())
        if still_open:
            temporary.rename(path)
        file.write(NEW[-10:])
    if not still_open:
        temporary.rename(path)
    await_condition(lambda: len(states(one, f"run/{NAME}")) == 2, "the new file is a save of its own")
    hold.release()
    await_state(one, f"run/{NAME}")
    assert path.read_bytes() == NEW
    assert states(one, f"run/{NAME}") == ["published", "published"]
    assert [files[NAME] == data for files, data in zip(published(world), (OLD, NEW), strict=True)] == [True, True]
    assert_written_once(world)
    world.verify(one, "run", {NAME: NEW})


@pytest.mark.parametrize("again", [True, False], ids=["created again", "gone for good"])
def test_a_name_deleted_while_it_is_sent(world: World, again: bool) -> None:
    """Created, deleted and created again at once: no old byte comes back in the mount, and the last save is the last
    published; what was complete before is not lost either.
    """
    one = world.node()
    path = one.mnt / "run" / NAME
    hold = held_upload(world, path, OLD)
    path.unlink()
    assert not path.exists()
    if again:
        write(path, tensors(100, "short-lived"))
        path.unlink()
        write(path, NEW)
        await_condition(lambda: "staged" in states(one, f"run/{NAME}")[1:], "the new file is staged")
    hold.release()
    await_state(one, f"run/{NAME}")
    assert published(world)[0] == {NAME: OLD}
    assert path.exists() == again
    if again:
        assert path.read_bytes() == NEW
    world.verify(one, "run", {NAME: NEW if again else OLD})


def test_a_file_changed_in_place_while_it_is_sent(world: World) -> None:
    """Each published version is one that the file really had: that of its first close, then that of its second."""
    one = world.node()
    path = one.mnt / "run" / NAME
    hold = held_upload(world, path, OLD)
    changed = OLD[:-5] + b"12345"
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"12345")
    await_condition(lambda: len(states(one, f"run/{NAME}")) == 2, "the change is a save of its own")
    hold.release()
    await_state(one, f"run/{NAME}")
    assert_same(published(world)[0], {NAME: OLD})
    world.verify(one, "run", {NAME: changed})


def test_a_file_of_an_open_save_rewritten_after_its_upload_began(world: World) -> None:
    """Its early upload is thrown away; the save holds the bytes at its close, and nothing is left behind."""
    one = world.node("node", "--early-upload-delay", "0")
    directory = one.mnt / "run" / "step-1"
    hold = held_upload(world, directory / "model.safetensors", OLD)
    write(directory / "model.safetensors", NEW)
    hold.release()
    saved = save(directory, {"model.safetensors": NEW})
    await_state(one, "run/step-1")
    client, bucket = world.bucket.client, world.bucket.bucket
    await_condition(lambda: not client.list_multipart_uploads(Bucket=bucket).get("Uploads"), "no upload is left")
    assert len(published(world)) == 1
    world.verify(one, "run", saved)


@pytest.mark.parametrize(
    ("temporary", "final", "file"),
    [
        ("7.orbax-checkpoint-tmp", "7", "_CHECKPOINT_METADATA"),
        ("tmp-checkpoint-8", "checkpoint-8", "trainer_state.json"),
    ],
)
def test_a_file_written_again_in_a_temporary_directory(world: World, temporary: str, final: str, file: str) -> None:
    """Orbax writes its metadata three times before it renames the directory: no open waits for that rename."""
    one = world.node()
    directory = one.mnt / "run" / temporary
    staged = one.staging / "tree" / "run" / temporary / file

    def is_open() -> bool:
        assert one.process is not None
        open_files = []
        for fd in Path(f"/proc/{one.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                open_files.append(os.readlink(fd))
        return str(staged) in open_files

    def train() -> None:
        for text in (b"{}", b"once more", b"last"):
            write(directory / file, text)
            await_condition(lambda: not is_open(), "the daemon has seen the close")
        directory.rename(directory.with_name(final))

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(PATIENCE)
    assert not training.is_alive(), "an open waits for the rename that comes after it"
    await_state(one, f"run/{final}")
    world.verify(one, "run", {file: b"last"})


def test_the_marker_closes_before_its_data(world: World) -> None:
    """The index is written while a file is still open: the save waits for it, and has its last byte."""
    one = world.node()
    directory = one.mnt / "run" / "step-1"
    directory.mkdir(parents=True)
    last = index(["model.safetensors"])
    with (directory / "model.safetensors").open("wb") as file:
        file.write(NEW[:-1])
        file.flush()
        write(directory / "model.safetensors.index.json", last)
        write(one.mnt / "other" / NAME, OLD)
        await_state(one, f"other/{NAME}")
        assert states(one, "run/step-1") == ["open"]
        file.write(NEW[-1:])
    await_state(one, "run/step-1")
    world.verify(one, "run", {"model.safetensors": NEW, "model.safetensors.index.json": last})


def test_rotation_neither_loses_nor_cancels_a_finished_save(world: World) -> None:
    """rmtree right after the save returned: it is published in full. An unfinished save is cancelled by it."""
    one = world.node()
    hold = Hold()
    world.proxy.on("", hold, key=SHARD, times=None)
    saved = save(one.mnt / "run" / "step-1", {"model-1.safetensors": OLD, "model-2.safetensors": tensors(0)})
    shutil.rmtree(one.mnt / "run" / "step-1")
    write(one.mnt / "run" / "step-2" / "model.safetensors", OLD)
    shutil.rmtree(one.mnt / "run" / "step-2")
    assert attempts(one, "run/step-1")[0]["state"] in ("open", "staged"), attempts(one, "run/step-1")
    hold.release()
    await_state(one, "run/step-1")
    await_state(one, "run/step-2", "abandoned")
    world.verify(one, "run", saved)


def archive() -> bytes:
    """Return a zip as torch.save writes them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", os.urandom(MIB))
    return buffer.getvalue()


WRITER = """
import os, signal, sys
path, source, length, closes = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "closes"
file = open(path, "wb", buffering=0)
file.write(open(source, "rb").read()[:length])
if closes:
    file.close()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("closes", [True, False], ids=["right after its close", "before its close"])
def test_a_writer_killed_after_its_last_byte(world: World, tmp_path: Path, closes: bool) -> None:
    """The file is whole, so it is published, whether its writer closed it or the kernel did."""
    one = world.node()
    data = archive()
    (one.mnt / "run").mkdir()
    kill_writer(one.mnt / "run" / "m.pt", tmp_path / "data", data, len(data), closes)
    await_state(one, "run/m.pt")
    world.verify(one, "run", {"m.pt": data})


def test_a_writer_killed_half_way(world: World, tmp_path: Path) -> None:
    """Half a file is never sealed, while later saves are published, nor by the next daemon."""
    one = world.node()
    data = archive()
    (one.mnt / "run").mkdir()
    kill_writer(one.mnt / "run" / "m-1.pt", tmp_path / "data", data, len(data) // 2, closes=False)
    await_condition(lambda: "incomplete" in one.logged(), "the log says that the file is incomplete")
    for step in (2, 3):
        write(one.mnt / "run" / f"m-{step}.pt", data)
        await_state(one, f"run/m-{step}.pt")
        assert states(one, "run/m-1.pt") == ["open"]
        assert one.stop() == 0
        if step == 2:
            one.start()
    assert [list(files) for files in published(world)] == [["m-2.pt"], ["m-3.pt"]]
    assert not [key for key in world.bucket.keys("runs/") if key.endswith("m-1.pt")]
    world.verify(one, "run", {"m-3.pt": data})


def kill_writer(path: Path, source: Path, data: bytes, length: int, closes: bool) -> None:
    """Write a file from a process that kills itself."""
    source.write_bytes(data)
    command = [sys.executable, "-c", WRITER, str(path), str(source), str(length), "closes" if closes else "keeps"]
    assert subprocess.run(command, check=False).returncode == -9
