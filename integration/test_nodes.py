"""Training on three machines, each with its own mount, disk and network: what is published is whole whatever dies.

Rank r of a DCP save runs on machine r and writes into the same path, which is another disk on each machine; rank 0, on
the owner's machine, writes `.metadata` last. One training goes through all tests: its step rises, and after every fault
the next save must be published. What is published is read with boto3 alone and loaded with torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.machines import Machine, bridge
from integration.node import await_condition
from integration.proxy import Action, Hold, Proxy, lose_request, passed
from integration.world import QUICK, World, attempts, await_state, contents, history, status
from tests.servers import Server

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = [
    pytest.mark.mount,
    pytest.mark.server,
    pytest.mark.torch,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]
SCRIPT = Path(__file__).with_name("scripts") / "dcp_node.py"
NAMES = ("a", "b", "c")
STEPS = 60
"""Saves that torch makes in advance; the tests write them file by file, in the order of DCP."""


class Site:
    """The machines, the store between them, and the training on them."""

    def __init__(self, world: World, machines: dict[str, Machine], material: Path) -> None:
        self.world = world
        self.machines = machines
        self.material = material
        self.step = 0
        self.published = 0

    def parts(self, names: str = "abc") -> str:
        """Let the ranks on the named machines write their files of the next save; return the path of it."""
        self.step += 1
        self.write(names)
        return self.path

    @property
    def path(self) -> str:
        """Return the path of the save under way."""
        return f"train/step-{self.step}"

    def write(self, names: str) -> None:
        """Write the files of these machines' ranks into the save under way."""
        for name in names:
            directory = self.machines[name].mnt / self.path
            directory.mkdir(parents=True, exist_ok=True)
            for file in (self.material / f"step-{self.step}").glob(f"__{NAMES.index(name)}_*.distcp"):
                shutil.copyfile(file, directory / file.name)

    def mark(self) -> None:
        """Let rank 0 finish the save."""
        directory = self.machines["a"].mnt / self.path
        shutil.copyfile(self.material / f"step-{self.step}" / ".metadata", directory / ".metadata.tmp")
        os.rename(directory / ".metadata.tmp", directory / ".metadata")

    def await_published(self, names: str = "abc") -> None:
        """Wait until these machines know that the newest save was published, and check all that the store holds."""
        for name in names:
            await_state(self.machines[name], self.path)
        self.published = self.step
        self.check()

    def next_save_is_published(self) -> None:
        """Save once more, without a fault."""
        self.parts()
        self.mark()
        self.await_published()

    def sync(self) -> None:
        """Take what is published for given."""
        if self.world.bucket.versions("ckpt/runs/train/pointer.json"):
            named = self.world.bucket.pointer("train")["published"]
            self.published = int(named["generation"].removeprefix("step-")) if named else 0

    def check(self) -> None:
        """What the pointer names is the newest save that was published, and torch loads it with the right values."""
        directory = self.world.root / "check" / f"step-{self.step}"
        named = self.world.bucket.pointer("train")["published"]
        assert (named["generation"] if named else "step-0") == f"step-{self.published}"
        if named is not None:  # pins, sizes and digests are checked by `files`
            for path, data in self.world.bucket.files("train").items():
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                (directory / path).write_bytes(data)
            load(directory, self.published)
            shutil.rmtree(directory)


def load(directory: Path, value: int) -> None:
    """Load a checkpoint of all ranks in this process, and check its values."""
    state = {f"rank{rank}": torch.zeros(256, 64) for rank in range(3)} | {"shared": torch.zeros(1000)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=directory, no_dist=True)
    for rank in range(3):
        assert torch.equal(state[f"rank{rank}"], torch.full((256, 64), float(value + rank)))
    assert torch.equal(state["shared"], torch.full((1000,), float(value)))


class Ranks:
    """One torch process per machine, in one process group over the network."""

    def __init__(self, machines: dict[str, Machine], stack: ExitStack) -> None:
        host, environ = machines["a"].address, {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = []
        for rank, one in enumerate(machines.values()):
            command = one.inside([sys.executable, str(SCRIPT), str(rank), str(len(machines)), host, "29500"])
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            self.processes.append(process)
        stack.callback(self.end)
        self._await_done()

    def end(self) -> None:
        """Let all ranks end; together, since they take leave of each other."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)
            process.stdout.close()
            process.stderr.close()

    def __call__(self, action: str, value: int, directory: Path) -> None:
        """Let all ranks save or load, and wait for them."""
        for process in self.processes:
            process.stdin.write(f"{action} {value} {directory}\n")
            process.stdin.flush()
        self._await_done()

    def _await_done(self) -> None:
        for process in self.processes:
            if process.stdout.readline() != "done\n":
                raise AssertionError(f"a rank has failed: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def world(moto_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        switch = stack.enter_context(bridge())
        proxy = stack.enter_context(Proxy(moto_server.endpoint_url, switch.address))
        yield World(moto_server, proxy, tmp_path_factory.mktemp("site"), stack, switch)


@pytest.fixture(scope="module")
def machines(world: World) -> dict[str, Machine]:
    """Machines a, b and c, running; their host names say who they are, and a owns the runs."""
    made = {name: world.machine(name, "--members", ",".join(NAMES), *QUICK) for name in NAMES}
    with ThreadPoolExecutor() as pool:
        list(pool.map(Machine.start, made.values()))
    return made


@pytest.fixture(scope="module")
def trained(world: World, machines: dict[str, Machine]) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(machines, stack)


@pytest.fixture(scope="module")
def training(world: World, machines: dict[str, Machine], trained: Ranks) -> Site:
    material = world.root / "material"
    for step in range(1, STEPS):
        trained("save", step, material / f"step-{step}")
    return Site(world, machines, material)


@pytest.fixture
def site(training: Site) -> Site:
    """The training as the test before left it, with something published."""
    training.sync()
    if not training.published:
        training.next_save_is_published()
    return training


@pytest.fixture(autouse=True)
def whole(world: World, machines: dict[str, Machine]) -> Iterator[None]:
    """Every test begins and ends with all machines on and the network whole."""
    yield
    world.proxy.end()
    for one in machines.values():
        assert one.process is not None
        assert one.process.poll() is None, one.logged()
        assert "Traceback" not in one.logged(), one.logged()


def test_ranks_on_three_machines_save_and_load(world: World, machines: dict[str, Machine], trained: Ranks) -> None:
    """Each rank writes to its own disk; a new machine with an empty disk restores the files of all, and torch loads
    them, in one process and with a rank on every machine.
    """
    for value in (10, 20):
        trained("save", value, machines["a"].mountpoint / "dcp" / f"step-{value}")
        for one in machines.values():
            await_state(one, f"dcp/step-{value}")
    written = {
        name: sorted(path.name for path in (one.mnt / "dcp" / "step-20").iterdir()) for name, one in machines.items()
    }
    assert written == {"a": [".metadata", "__0_0.distcp"], "b": ["__1_0.distcp"], "c": ["__2_0.distcp"]}
    fresh = world.machine("d")
    fresh.boot()
    target = world.root / "restored"
    fresh.run("restore", "dcp", target, "--store", fresh.store, *fresh.options[:2])
    fresh.power_off()
    assert contents(target / "step-20") == world.bucket.files("dcp")
    load(target / "step-20", 20)
    trained("load", 20, target / "step-20")


STAGES: dict[str, tuple[str, str, int, bool]] = {
    "its upload begins": ("PutObject", "/shards/c/", 0, False),
    "its upload is done": ("PutObject", "/shards/c/", 0, True),
    "its report is sent": ("PutObject", "/members/c.json", 0, False),
    "its report is there": ("PutObject", "/members/c.json", 0, True),
    "the seal": ("PutObject", "/manifest[-0-9]*.json", 0, False),
    "its share of the restore test": ("PutObject", "/tests/[0-9]+/c.json", 0, False),
}
"""Which request is held when the fault comes, how many like it go before, and whether it is held after its effect."""
REPORTED = ("its report is there", "the seal", "its share of the restore test")


def hold(site: Site, stage: str, then: Action = passed) -> Hold:
    """Save, and hold the request of a stage; `then` is what becomes of it."""
    operation, key, skip, after = STAGES[stage]
    held = Hold(then, after=after)
    site.world.proxy.on(operation, held, key=key, skip=skip)
    site.parts()
    site.mark()
    held.arrived()
    site.check()
    return held


@pytest.mark.parametrize("stage", STAGES)
def test_a_daemon_killed_and_started_again(site: Site, stage: str) -> None:
    """Nothing is lost: the save is published."""
    held = hold(site, stage)
    site.machines["c"].kill()
    held.release()
    if stage not in REPORTED:
        site.check()
    site.machines["c"].start()
    site.await_published()


def test_a_daemon_killed_before_the_close(site: Site) -> None:
    """All of its files were written: the close comes from another machine, and the save is published."""
    site.parts()
    site.machines["c"].kill()
    site.machines["c"].start()
    site.mark()
    site.await_published()


@pytest.mark.parametrize(
    "stage", ["its upload begins", "its report is sent", "its report is there", "its share of the restore test"]
)
def test_a_machine_lost_for_good(site: Site, stage: str) -> None:
    """Another one with an empty disk takes its name. What the lost one had reported is published; a save that was not
    complete is abandoned, with its name. The next save is published, without anybody's help.
    """
    held = hold(site, stage, passed if stage in REPORTED else lose_request)
    lost = site.machines["c"]
    lost.power_off()
    held.release()
    lost.lose_disk()
    lost.start()
    if stage in REPORTED:
        site.await_published("ab")
    else:
        for name in "ab":
            await_state(site.machines[name], site.path, "abandoned")
            assert (
                "member c cannot take part: it was opened before"
                in attempts(site.machines[name], site.path)[-1]["error"]
            )
        site.check()
    site.next_save_is_published()


def test_a_machine_lost_before_the_close(site: Site) -> None:
    """Another one with an empty disk cannot know what was written in the save under way, and ends it. Training starts
    again from the last checkpoint and writes the save a second time, on all machines: it is published.
    """
    site.parts()
    lost = site.machines["c"]
    await_condition(lambda: world_open(site, "train"), "the attempt is open")
    lost.power_off()
    lost.lose_disk()
    lost.start()
    for name in "ab":
        await_state(site.machines[name], site.path, "abandoned")
    site.check()
    site.write("abc")
    site.mark()
    site.await_published()
    site.next_save_is_published()


def world_open(site: Site, run: str) -> list[dict[str, str]]:
    """Return the open attempts of a run."""
    found: list[dict[str, str]] = site.world.bucket.pointer(run)["open"]
    return found


@pytest.mark.parametrize("stage", ["its upload begins", "its share of the restore test"])
def test_a_network_that_is_cut_and_healed(site: Site, stage: str) -> None:
    """Nothing but time is lost."""
    held = hold(site, stage)
    one = site.machines["c"]
    one.cut()
    held.release()
    if stage not in REPORTED:
        site.check()
    one.heal()
    site.await_published()
    assert status(one)["store_health"] == "ok"


OWNER: dict[str, tuple[str, str, int, bool]] = {
    "open, not listed": ("PutObject", "/open.json", 0, True),
    "open": ("PutObject", "/pointer.json", 0, True),
    "sealed": ("PutObject", "/manifest[-0-9]*.json", 0, True),
    "tested": ("PutObject", "/test[-0-9]*.json", 0, True),
    "before the promotion": ("PutObject", "/pointer.json", 1, False),
    "after the promotion": ("PutObject", "/pointer.json", 1, True),
}


def hold_owner(site: Site, stage: str) -> Hold:
    """Save, and hold the request of a stage of the owner."""
    operation, key, skip, after = OWNER[stage]
    held = Hold(after=after)
    site.world.proxy.on(operation, held, key=key, skip=skip)
    site.parts()
    site.mark()
    held.arrived()
    return held


@pytest.mark.parametrize("stage", OWNER)
def test_an_owner_killed_and_started_again(site: Site, stage: str) -> None:
    """It adopts what it left open under a new epoch; published once."""
    held = hold_owner(site, stage)
    site.machines["a"].kill()
    held.release()
    site.machines["a"].start()
    site.await_published()
    promoted = [
        one["published"]["generation"] for one in history(site.world.bucket, "train") if one["kind"] == "promote"
    ]
    assert promoted.count(f"step-{site.step}") == 1


@pytest.mark.parametrize("stage", ["open", "sealed", "before the promotion", "after the promotion"])
def test_an_owner_lost_for_good(site: Site, stage: str) -> None:
    """Another machine becomes the owner: what all had reported is published. What was not is abandoned when the lost
    one's name is there again.
    """
    held = hold_owner(site, stage)
    a, b = site.machines["a"], site.machines["b"]
    a.power_off()
    held.release()
    a.lose_disk()
    b.kill()
    try:
        b.start("--owner", "yes", "--member-deadline", "3")
        if stage == "open":  # the marker was on the lost disk
            a.start("--owner", "no")
            for name in "bc":
                await_state(site.machines[name], site.path, "abandoned")
                error = attempts(site.machines[name], site.path)[-1]["error"]
                assert "member a cannot take part: it was opened before" in error
            site.check()
        else:
            site.await_published("bc")
            a.start("--owner", "no")
        site.next_save_is_published()
        owners = {one["owner"].split("/")[0] for one in history(site.world.bucket, "train")[-2:]}
        assert owners == {"b"}
    finally:
        for one in (a, b):
            if one.process is not None:
                one.kill()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Machine.start, (a, b)))
    site.next_save_is_published()
