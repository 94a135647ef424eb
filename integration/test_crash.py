"""The daemon is killed, with `kill -9`, at every stage of a save's way; then it is started again.

The proxy holds a request, so the kill comes at exactly that stage. What was sent goes on its way after the kill: late
requests of the dead daemon reach the store after those of its successor.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.formats.keys import Keys
from cachefs.formats.records import AttemptRecord, PartRecord
from cachefs.journal import Journal
from cachefs.restore import reader
from cachefs.restore.shards import read_shard
from cachefs.store.open import open_store
from integration.disks import cut_power, disk, photograph
from integration.node import PATIENCE, Node, await_condition, engine, node
from integration.proxy import Hold, Request, reset
from integration.world import (
    MIB,
    PART,
    POINTER,
    SHARD,
    World,
    assert_same,
    assert_written_once,
    attempts,
    await_state,
    history,
    metric,
    save,
    states,
    tensors,
    write,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]

FILES = {"model-1.safetensors": tensors(2 * PART + MIB), "model-2.safetensors": tensors(9)}
PARTS = 3


def journaled(one: Node) -> tuple[list[AttemptRecord], list[PartRecord]]:
    """Return what a daemon's journal knows of saves and of acknowledged parts."""
    journal = Journal(one.staging / "journal")
    try:
        with journal.read() as txn:
            return list(txn.attempts.scan()), list(txn.parts.scan())
    finally:
        journal.close()


def kill_pending(one: Node) -> AttemptRecord:
    """Kill the daemon; return the one save that is pending. Fails the test when none is."""
    one.kill()
    (attempt,) = [attempt for attempt in journaled(one)[0] if not attempt.state.final]
    assert attempt.closed_at is not None
    return attempt


STAGES: dict[str, tuple[str, str, str, int, bool]] = {
    "the upload begins": ("staged", "CreateMultipartUpload", SHARD, 0, False),
    "the upload has begun": ("staged", "CreateMultipartUpload", SHARD, 0, True),
    "in the middle of the parts": ("staged", "UploadPart", SHARD, 1, False),
    "before the parts are joined": ("staged", "CompleteMultipartUpload", SHARD, 0, False),
    "after the parts are joined": ("staged", "CompleteMultipartUpload", SHARD, 0, True),
    "all is flushed": ("flushed", "PutObject", "/members/", 0, False),
    "after the report": ("flushed", "PutObject", "/members/", 0, True),
    "before the seal": ("flushed", "PutObject", "/manifest.json$", 0, False),
    "after the seal": ("flushed", "PutObject", "/manifest.json$", 0, True),
    "in the restore test": ("sealed", "GetObject", SHARD, 0, False),
    "after the test": ("tested", "PutObject", POINTER, 2, False),
    "after the promotion": ("tested", "PutObject", POINTER, 2, True),
}
"""The state that the journal must show, the request that is held, how many like it go before, and whether it is held
after its effect.
"""


@pytest.mark.parametrize("stage", STAGES)
def test_killed_on_the_way_to_the_pointer(world: World, stage: str) -> None:
    """Wherever the daemon dies, the next one publishes the save once, sends no shard a second time that the store has,
    and is not harmed by the late request of the dead one.
    """
    state, operation, key, skip, after = STAGES[stage]
    one = world.node()
    hold = Hold(after=after)
    # The grant and the announcement come before the promotion, and are pointers too.
    world.proxy.on(operation, hold, key=key, skip=skip)
    saved = save(one.mnt / "run" / "step-1", FILES)
    hold.arrived()
    if operation in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"):
        await_condition(lambda: attempts(one, "run/step-1")[0]["files_flushed"] == 2, "the small files are flushed")
    assert kill_pending(one).state == state
    complete = {request.key for request in world.proxy.requests("PutObject", SHARD) if request.effect == 200}
    held = next(request for request in world.proxy.requests(operation, key) if after or request.effect is None)
    world.proxy.forget()
    one.start()
    await_state(one, "run/step-1")
    again = world.proxy.requests("PutObject", SHARD)
    assert not {request.key for request in again} & complete
    if state != "staged":
        assert not world.proxy.requests("UploadPart", SHARD)
    hold.release()
    await_condition(lambda: held.effect is not None, "the late request has reached the store")
    assert_written_once(world)
    assert [pointer["kind"] for pointer in history(world.bucket, "run")].count("promote") == 1
    if stage == "the upload begins":  # the late request has begun an upload that nobody knows: the next start ends it
        assert uploads(world)
        assert one.stop() == 0
        one.start()
    await_condition(lambda: not uploads(world), "no upload is left")
    world.verify(one, "run", saved)


def uploads(world: World) -> list[str]:
    """Return the ids of uploads in progress."""
    listed = world.bucket.client.list_multipart_uploads(Bucket=world.bucket.bucket)
    return [upload["UploadId"] for upload in listed.get("Uploads", [])]


def test_killed_right_after_the_close(world: World) -> None:
    """A file that its writer closed in the instant before the kill is published by the next daemon."""
    one = world.node()
    saved = {"m.safetensors": tensors(6 * PART)}
    world.proxy.on("", reset, times=None)
    write(one.mnt / "run" / "m.safetensors", saved["m.safetensors"])
    one.kill()
    assert [attempt.state for attempt in journaled(one)[0]] in (["open"], ["staged"])
    world.proxy.end()
    one.start()
    await_state(one, "run/m.safetensors")
    world.verify(one, "run", saved)


def test_power_is_cut_before_a_save_is_synced(world: World) -> None:
    """The names, the sizes and the journal's word that the save is complete reach the disk; the bytes do not. It is
    never published, and the next save is.
    """
    place = world.enter(disk("ext4", world.root / "disk", 128 * MIB))
    one = world.place("node")
    one.staging = place / "staging"
    one.start()
    files = [one.mnt / "run" / name for name in ("m.tmp", "m.safetensors")]
    files[0].parent.mkdir()
    stopped = engine(one)
    os.kill(stopped, signal.SIGSTOP)
    lost = tensors(2 * PART)
    with files[0].open("wb") as file:  # as safetensors does
        file.truncate(len(lost))
        file.write(lost[:MIB])
        file.flush()
        os.fsync(file.fileno())  # the kernel has written back the beginning, so that the format looks whole
        file.write(lost[MIB:])
    files[0].rename(files[1])
    await_condition(lambda: any(attempt.closed_at is not None for attempt in journaled(one)[0]), "it is closed")
    photograph(place)
    one.kill()
    with suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGKILL)
    one.end()
    cut_power(place)
    torn = (one.staging / "tree/run/m.safetensors").read_bytes()
    assert len(torn) == len(lost)
    assert torn != lost
    (attempt,) = journaled(one)[0]
    journal = Journal(one.staging / "journal")  # this machine did not really stop
    journal.write_now(lambda txn: txn.update_attempt(attempt.attempt, boot="the boot before"))
    journal.close()
    one.start()
    await_state(one, "run/m.safetensors", "abandoned")
    saved = {"m.safetensors": tensors(PART, "again")}
    write(files[1], saved["m.safetensors"])
    await_state(one, "run/m.safetensors")
    assert states(one, "run/m.safetensors") == ["abandoned", "published"]
    world.verify(one, "run", saved)


def test_killed_while_a_directory_that_got_its_name_is_pinned(tmp_path: Path) -> None:
    """The rename was the close signal, and came before the kill. So many files keep the daemon busy for a while."""
    (tmp_path / "store").mkdir()
    with node(tmp_path / "node", f"file://{tmp_path}/store") as one, ThreadPoolExecutor() as trainer:
        old, new = one.mnt / "ol" / "step2-tmp", one.mnt / "ol" / "step2"
        for number in range(3000):
            file = old / "train" / f"rank{number}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x")
        (old / "config.yaml").write_bytes(b"model: olmo\n")
        renamed = trainer.submit(old.rename, new)
        await_condition(lambda: [attempt.path for attempt in journaled(one)[0]] == ["ol/step2"], "it has its name")
        one.kill()
        with suppress(OSError):  # the rename has happened, and nobody answered
            renamed.result(PATIENCE)
        (attempt,) = journaled(one)[0]
        assert attempt.closed_at is None
        one.start()
        one.wait("ol/step2", "staged")
        (attempt,) = journaled(one)[0]
        assert (attempt.files, attempt.preset) == (3001, "olmo")


def test_killed_while_a_save_is_written(world: World) -> None:
    """A save of which a file is half written and the marker is missing is never sealed; written again, it is."""
    one = world.node()
    directory = one.mnt / "run" / "step-1"
    write(directory / "model-1.safetensors", FILES["model-1.safetensors"])
    with (directory / "model-2.safetensors").open("wb", buffering=0) as file:
        file.write(FILES["model-1.safetensors"][:MIB])
        await_state(one, "run/step-1", "open")
        one.kill()
    one.start()
    write(one.mnt / "run" / "later.safetensors", FILES["model-2.safetensors"])
    await_state(one, "run/later.safetensors")
    assert states(one, "run/step-1") == ["open"]
    assert not world.proxy.requests("PutObject", "/close.json")[1:]
    saved = save(directory, FILES)
    await_state(one, "run/step-1")
    assert {"published", "abandoned"} >= set(states(one, "run/step-1"))
    world.verify(one, "run", saved)


def test_late_in_a_large_upload(world: World) -> None:
    """After a kill late in a large upload only the missing parts are sent. Uploads that a dead daemon of this member
    began and nobody knows are aborted; those of others are not.
    """
    one = world.node(metrics=True)
    count = 6
    saved = {"m.safetensors": tensors((count - 1) * PART + MIB)}
    hold = Hold()
    world.proxy.on("UploadPart", hold, where=lambda request: request.part == count)

    def sent() -> list[Request]:
        return world.proxy.requests("UploadPart", SHARD)

    write(one.mnt / "run" / "m.safetensors", saved["m.safetensors"])
    hold.arrived()
    await_condition(lambda: len(journaled(one)[1]) == count - 1, "all other parts are acknowledged")
    kill_pending(one)
    client, bucket = world.bucket.client, world.bucket.bucket
    stray = sent()[0].key.rpartition("/")[0] + "/0123456789abcdef-stray"
    client.create_multipart_upload(Bucket=bucket, Key=stray)
    foreign = client.create_multipart_upload(Bucket=bucket, Key=stray.replace("/shards/node/", "/shards/other/"))
    world.proxy.forget()
    one.start()
    await_state(one, "run/m.safetensors")
    assert [part.part for part in sent()] == [count]
    assert [request.key for request in world.proxy.requests("AbortMultipartUpload", SHARD)] == [stray]
    assert uploads(world) == [foreign["UploadId"]]
    await_condition(lambda: metric(one, "cachefs_orphaned_uploads_aborted_total") == 1, "it is counted")
    world.verify(one, "run", saved)


def test_unmounted_one_second_after_the_close_while_the_store_is_away(world: World) -> None:
    """Nothing is lost: the exit code and the log say what is pending, a start without the store serves all the same,
    and the save is published when the store is back.
    """
    one = world.node("node", "--drain-timeout", "1")
    world.proxy.on("", reset, times=None)
    saved = save(one.mnt / "run" / "step-1", FILES)
    await_state(one, "run/step-1", "staged")
    subprocess.run(["fusermount3", "-u", one.mnt], check=True)
    assert one.process is not None
    assert one.process.wait(60) == 75
    assert "1 generations not published: 3 files" in one.logged()
    one.process = None
    one.start()
    assert states(one, "run/step-1") == ["staged"]
    assert_same({path.name: path.read_bytes() for path in (one.mnt / "run" / "step-1").iterdir()}, saved)
    world.proxy.end()
    await_state(one, "run/step-1")
    world.verify(one, "run", saved)


WRITER = """
import os, sys
target = sys.argv[1]
number = int(sys.argv[2])
while True:
    path = f"{target}/step-{number}.safetensors"
    data = open(sys.argv[3], "rb").read() + bytes([number % 256]) * 70000
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(data), 10000):
            file.write(data[at:at + 10000])
            os.fsync(file.fileno())
            print(number, min(at + 10000, len(data)), flush=True)
    number += 1
"""


def test_what_fsync_acknowledged_survives_every_kill(tmp_path: Path) -> None:
    """Ten kills at random moments: every byte whose fsync returned is in the mount afterwards, and every file that was
    acknowledged whole is published in the end.
    """
    moments = random.Random(20)
    header = tensors(0).replace(
        b'"shape": [0], "data_offsets": [0, 0]', b'"shape": [70000], "data_offsets": [0, 70000]'
    )
    header = len(header[8:]).to_bytes(8, "little") + header[8:]
    (tmp_path / "header").write_bytes(header)
    size = len(header) + 70000
    acknowledged: dict[int, int] = {}
    (tmp_path / "store").mkdir()
    with node(tmp_path / "node", f"file://{tmp_path}/store") as one:
        for _ in range(10):
            (one.mnt / "run").mkdir(exist_ok=True)
            first = max(acknowledged, default=0) + 1
            command = [sys.executable, "-c", WRITER, str(one.mnt / "run"), str(first), str(tmp_path / "header")]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as writer:
                assert writer.stdout is not None
                for _ in range(moments.randrange(1, 40)):
                    number, length = map(int, writer.stdout.readline().split())
                    acknowledged[number] = length
                time.sleep(moments.uniform(0, 0.01))  # so that the kill comes anywhere between two acknowledgements
                one.kill()
                for line in writer.stdout:
                    number, length = map(int, line.split())
                    acknowledged[number] = length
            one.start()
            for number, length in acknowledged.items():
                found = (one.mnt / "run" / f"step-{number}.safetensors").read_bytes()
                assert found[:length] == (header + bytes([number % 256]) * 70000)[:length]
        whole = sorted(number for number, length in acknowledged.items() if length == size)
        assert len(whole) > 10
        for number in whole:
            await_condition(lambda: states(one, f"run/step-{number}.safetensors")[-1:] == ["published"], f"{number}")  # noqa: B023
        assert one.stop() == 0
        one.wipe_staging()
    store = open_store(f"file://{tmp_path}/store")
    keys = Keys(store.prefix)
    for number in whole:
        published = reader.find(store, keys, "run", f"step-{number}.safetensors")
        (shard,) = reader.load_manifest(store, "run", published).shards
        found = bytearray()
        read_shard(store, shard, lambda _at, data: found.extend(data))  # noqa: B023
        assert bytes(found) == header + bytes([number % 256]) * 70000
