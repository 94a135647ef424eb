"""Real frameworks, and the write orders of others, through the mount to the bucket and back.

Each save is published, the local disk is lost, the bucket is verified with boto3 alone, and what `cachefs restore`
brings back is loaded by the framework itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.bucket import Bucket
from integration.node import Node, node
from integration.world import index, tensors
from tests.servers import Server

pytestmark = [pytest.mark.mount, pytest.mark.server]
SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture
def bucket(moto_server: Server) -> Bucket:
    client = moto_server.session().client("s3", endpoint_url=moto_server.endpoint_url)
    return Bucket(client, moto_server.bucket(), "ckpt")


@pytest.fixture
def trainer(tmp_path: Path, moto_server: Server, bucket: Bucket) -> Iterator[Node]:
    with node(
        tmp_path / "node",
        f"s3://{bucket.bucket}/ckpt",
        options=("--endpoint-url", moto_server.endpoint_url, "--part-size", "5MiB"),
        environ=moto_server.environ,
    ) as one:
        yield one


def lose_and_restore(trainer: Node, bucket: Bucket, run: str, saved: dict[str, bytes], target: Path) -> Path:
    """Lose the disk; verify the bucket against what was saved; return the directory the run is restored to."""
    assert trainer.stop() == 0
    trainer.wipe_staging()
    assert bucket.files(run) == saved
    trainer.run("restore", run, target, "--store", trainer.store, *trainer.options[:2])
    return target


def contents(directory: Path) -> dict[str, bytes]:
    """Return a directory's files by relative path."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def write(path: Path, data: bytes, *, sync: bool = False) -> None:
    with path.open("wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


@pytest.mark.torch
def test_torch_save_overwrites_one_path(trainer: Node, bucket: Bucket, tmp_path: Path) -> None:
    """Every completed overwrite is a save of its own; what is published last are the last bytes."""
    torch = pytest.importorskip("torch")
    path = trainer.mnt / "loop" / "model.pt"
    path.parent.mkdir()
    for step in range(5):
        torch.save({"step": step, "weights": torch.full((1 << 19,), float(step))}, path)
    trainer.wait("loop/model.pt")
    assert {one["state"] for one in trainer.generations("loop/model.pt")} == {"published"}
    assert len(trainer.generations("loop/model.pt")) == 5
    saved = {"model.pt": path.read_bytes()}
    restored = lose_and_restore(trainer, bucket, "loop", saved, tmp_path / "out")
    loaded = torch.load(restored / "model.pt", mmap=True)
    assert loaded["step"] == 4
    assert float(loaded["weights"].sum()) == 4.0 * (1 << 19)


@pytest.mark.torch
def test_dcp_two_ranks_and_a_second_save_of_the_same_directory(trainer: Node, bucket: Bucket, tmp_path: Path) -> None:
    """A save by two processes closes with the coordinator's rename; saving into the directory again is a new
    attempt.
    """
    directory = trainer.mnt / "dcp" / "step-100"
    for value in (1.0, 7.0):
        ranks("save", directory, value)
        trainer.wait("dcp/step-100")
    attempts = trainer.generations("dcp/step-100")
    assert [one["state"] for one in attempts] == ["published", "published"]
    assert {one["step"] for one in attempts} == {100}
    saved = contents(directory)
    restored = lose_and_restore(trainer, bucket, "dcp", saved, tmp_path / "out")
    assert len([name for name in saved if name.endswith(".distcp")]) == 2
    ranks("load", restored / "step-100", 7.0)


def ranks(action: str, directory: Path, value: float, world: int = 2) -> None:
    """Run all ranks of a DCP save or load."""
    script = [sys.executable, str(SCRIPTS / "dcp_ranks.py"), action]
    with tempfile.TemporaryDirectory() as meeting, ExitStack() as stack:
        told = [f"{meeting}/ranks", str(directory), str(value)]
        processes = []
        for rank in range(world):
            command = [*script, str(rank), str(world), *told]
            processes.append(stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE)))
            stack.callback(processes[-1].kill)
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()


@pytest.mark.torch
def test_deepspeed_order(trainer: Node, bucket: Bucket, tmp_path: Path) -> None:
    """Shards of all ranks, the copied script, then `latest` in place, with nothing after it but silence."""
    torch = pytest.importorskip("torch")
    run = trainer.mnt / "ds"
    directory = run / "global_step20"
    directory.mkdir(parents=True)
    for rank in range(2):
        torch.save({"rank": rank}, directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"model": torch.ones(1000)}, directory / "mp_rank_00_model_states.pt")
    shutil.copyfile(__file__, run / "zero_to_fp32.py")
    (run / "zero_to_fp32.py").chmod(0o755)
    (run / "latest").write_text("global_step20")
    trainer.wait("ds/global_step20", timeout=120)
    restored = lose_and_restore(trainer, bucket, "ds", contents(directory), tmp_path / "out")
    assert (restored / "latest").read_text() == "global_step20"
    assert torch.load(restored / "global_step20" / "mp_rank_00_model_states.pt")["model"].sum() == 1000


@pytest.mark.torch
def test_megatron_order(trainer: Node, bucket: Bucket, tmp_path: Path) -> None:
    """DCP files and metadata.json do not close the save; the tracker does, and the tokenizer files after it belong."""
    run = trainer.mnt / "mega"
    directory = run / "iter_0000500"
    directory.mkdir(parents=True)
    ranks("save", directory, 3.0)
    write(directory / "metadata.json", b'{"sharded_backend": "torch_dist"}')
    assert trainer.generations("mega/iter_0000500")[-1]["state"] == "open"
    (run / "latest_checkpointed_iteration.txt").write_text("500")
    (directory / "tokenizer").mkdir()
    write(directory / "tokenizer" / "tokenizer.json", b"{}")
    with (run / "progress.txt").open("a") as log:
        log.write("saved\n")
    trainer.wait("mega/iter_0000500")
    saved = contents(directory)
    assert "tokenizer/tokenizer.json" in saved
    restored = lose_and_restore(trainer, bucket, "mega", saved, tmp_path / "out")
    assert (restored / "latest_checkpointed_iteration.txt").read_text() == "500"
    ranks("load", restored / "iter_0000500", 3.0)


def test_orbax_order(trainer: Node, bucket: Bucket, tmp_path: Path) -> None:
    """A temporary directory with items, locks, nested renames and directory syncs; the outer rename closes."""
    run = trainer.mnt / "orbax"
    temp, final = run / "7.orbax-checkpoint-tmp", run / "7"
    item = temp / "default.orbax-checkpoint-tmp"
    (item / "ocdbt.process_0" / "d").mkdir(parents=True)
    write(temp / "_CHECKPOINT_METADATA", b"{}")
    write(item / "ocdbt.process_0" / "d" / "a1b2", os.urandom(1 << 20), sync=True)
    for name in ("manifest.ocdbt", "_sharding"):
        lock = item / f"{name}.__lock"
        with lock.open("wb") as file:
            fcntl.fcntl(file, fcntl.F_OFD_SETLKW, _lock(fcntl.F_WRLCK))
            file.write(name.encode())
            file.flush()
            os.fsync(file.fileno())
            os.rename(lock, item / name)  # before the descriptor is closed
        sync_directory(item)
    write(item / "_METADATA", b"{}")
    write(item / "commit_success.txt", b"ok")
    os.rename(item, temp / "default")
    write(temp / "commit_success.txt", b"ok")
    os.rename(temp, final)
    trainer.wait("orbax/7")
    saved = contents(final)
    assert "default/manifest.ocdbt" in saved
    restored = lose_and_restore(trainer, bucket, "orbax", saved, tmp_path / "out")
    assert contents(restored / "7") == saved


def _lock(kind: int) -> bytes:
    return struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def test_a_sharded_model_in_a_directory_of_any_name(trainer: Node, bucket: Bucket, tmp_path: Path) -> None:
    """What `save_pretrained("final")` writes is one generation: the run holds it, and none of its shards."""
    final = trainer.mnt / "hf" / "final"
    final.mkdir(parents=True)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    files = {"config.json": b"{}", **{name: tensors(1000, name) for name in names}}
    for name, data in {**files, "model.safetensors.index.json": index(names), "tokenizer.json": b"{}"}.items():
        write(final / name, data)
    trainer.wait("hf/final")
    saved = contents(final)
    restored = lose_and_restore(trainer, bucket, "hf", saved, tmp_path / "out")
    assert contents(restored) == {f"final/{name}": data for name, data in saved.items()}
    listed = trainer.run("ls", "hf", "--json", "--store", trainer.store, *trainer.options[:2]).stdout
    assert [entry["published"]["generation"] for entry in json.loads(listed)] == ["final"]


@pytest.mark.torch
def test_safetensors(trainer: Node, bucket: Bucket, tmp_path: Path) -> None:
    """safetensors 0.8 sets the size first and renames a temporary name before it closes the file."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    path = trainer.mnt / "st" / "model.safetensors"
    path.parent.mkdir()
    for value in (1.0, 2.0):
        safetensors.save_file({"w": torch.full((1 << 21,), value)}, path)
    trainer.wait("st/model.safetensors")
    saved = {"model.safetensors": path.read_bytes()}
    restored = lose_and_restore(trainer, bucket, "st", saved, tmp_path / "out")
    assert float(safetensors.load_file(restored / "model.safetensors")["w"][0]) == 2.0
