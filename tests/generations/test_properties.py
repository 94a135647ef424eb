"""Whatever programs do, the detector keeps its guarantees. The tree in memory is the authority on who still writes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.generations.actions import AbandonSave, CancelSave, CloseSave, MoveSave, OpenSave
from cachefs.staging.changes import Change, Kind

from .world import TENSORS, ZIP, World, dcp_metadata

PARTS = (
    "run", "ck", "step-5", "step-6", "step5", "step5-tmp", "checkpoint-5", "tmp-checkpoint-5", "10",
    "10.orbax-checkpoint-tmp", "iter_0000100", "global_step5", "last.ckpt", "x.tmp", "pytorch_model_fsdp_0", "release",
)  # fmt: skip
LEAVES = (
    "__0_0.distcp", "__1_0.distcp", ".metadata", ".metadata.tmp", "meta.pt", "trainer_state.json", "metadata.json",
    "latest", "latest_checkpointed_iteration.txt", "model.pt", "model.safetensors", "config.yaml", ".metadata.json",
    "_CHECKPOINT_METADATA", "commit_success.txt", "recipe_state.pt", ".tmpA", "m-step=5-unfinished", "latest-rank0.pt",
)  # fmt: skip
CONTENTS = (b"", b"100", b"global_step5", ZIP, ZIP[:50], TENSORS, b"\x80\x02x", dcp_metadata("__0_0.distcp"))

directories = st.lists(st.sampled_from(PARTS), max_size=3).map("/".join)
paths = st.tuples(directories, st.sampled_from(LEAVES)).map(lambda pair: "/".join(part for part in pair if part))
operations = st.one_of(
    st.tuples(st.just("create"), paths, st.sampled_from(CONTENTS)),
    st.tuples(st.just("put"), paths, st.sampled_from(CONTENTS)),
    st.tuples(st.just("reopen"), st.integers(0, 50)),
    st.tuples(st.just("close"), st.integers(0, 50)),
    st.tuples(st.just("rename"), st.integers(0, 50), paths),
    st.tuples(st.just("rename_directory"), directories, directories),
    st.tuples(st.just("link"), st.integers(0, 50), paths),
    st.tuples(st.just("symlink"), st.sampled_from(("step-5", "x", "run/10")), paths),
    st.tuples(st.just("unlink"), st.integers(0, 50)),
    st.tuples(st.just("rmtree"), directories),
    st.tuples(st.just("wait"), st.sampled_from((1.0, 10.0, 700.0))),
    st.tuples(st.just("hand"), directories),
)


class Program:
    """Runs operations that are possible on the tree as it is; the others do nothing."""

    def __init__(self) -> None:
        self.world = World()
        self.handles = []

    def run(self, name, *arguments) -> None:
        getattr(self, name)(*arguments)

    def _pick(self, number, *, links=False):
        names = sorted(path for path, node in self.world.files.items() if links or node.target is None)
        return names[number % len(names)].decode() if names else None

    def _clash(self, path: str) -> bool:
        """A path that is a directory here, below a file, or below a link."""
        name = path.encode()
        files = self.world.files
        parts = name.split(b"/")
        return any(other.startswith(name + b"/") for other in files) or any(
            b"/".join(parts[:end]) in files for end in range(1, len(parts))
        )

    def create(self, path, data) -> None:
        node = self.world.files.get(path.encode())
        if not self._clash(path) and (node is None or node.target is None):
            self.handles.append(self.world.create(path, data))

    def put(self, path, data) -> None:
        count = len(self.handles)
        self.create(path, data)
        if len(self.handles) > count:
            self.handles.pop().close()

    def reopen(self, number) -> None:
        if path := self._pick(number):
            self.handles.append(self.world.reopen(path))

    def close(self, number) -> None:
        if self.handles:
            self.handles.pop(number % len(self.handles)).close()

    def rename(self, number, path) -> None:
        old = self._pick(number, links=True)
        if old and old != path and not self._clash(path):
            self.world.rename(old, path)

    def rename_directory(self, old, new) -> None:
        inside = old and new and (new + "/").startswith(old + "/")
        filled = any(name.startswith(old.encode() + b"/") for name in self.world.files)
        free = not self._clash(new) and new.encode() not in self.world.files
        if old and new and not inside and filled and free:
            self.world.rename(old, new)

    def link(self, number, path) -> None:
        old = self._pick(number)
        if old and path.encode() not in self.world.files and not self._clash(path):
            self.world.link(old, path)

    def symlink(self, target, path) -> None:
        if path.encode() not in self.world.files and not self._clash(path):
            self.world.symlink(target, path)

    def unlink(self, number) -> None:
        if path := self._pick(number, links=True):
            self.world.unlink(path)

    def rmtree(self, path) -> None:
        if path and any(name.startswith(path.encode() + b"/") for name in self.world.files):
            self.world.rmtree(path)

    def wait(self, seconds) -> None:
        self.world.wait(seconds)

    def hand(self, path) -> None:
        from cachefs.errors import InvalidError

        if path and self.world.names(path.encode()):
            try:
                self.world._check(self.world.detector.close_now(path.encode(), self.world.now, self.world))
            except InvalidError:
                pass

    def check(self) -> None:
        detector = self.world.detector
        roots = [*detector._saves, *detector._closed]
        assert len(roots) == len(set(roots))
        for outer in roots:
            assert not any(inner.startswith(outer + b"/") for inner in roots), (outer, roots)


def check_order(actions) -> None:
    """Every save is opened once and ended once; a move keeps it."""
    open_paths = set()
    for action in actions:
        if isinstance(action, OpenSave):
            assert action.placement.path not in open_paths
            open_paths.add(action.placement.path)
        elif isinstance(action, CloseSave | CancelSave | AbandonSave):
            open_paths.remove(action.path)
        elif isinstance(action, MoveSave):
            open_paths.remove(action.old)
            assert action.placement.path not in open_paths
            open_paths.add(action.placement.path)


@settings(max_examples=400, deadline=None)
@given(st.lists(operations, max_size=40))
def test_no_program_breaks_the_guarantees(steps):
    program = Program()
    for step in steps:
        program.run(*step)
        program.check()
    check_order(program.world.actions)
    program.wait(10_000)
    check_order(program.world.actions)


raw_paths = st.one_of(paths, directories, st.sampled_from(["", "a", "%", "\udcff"])).map(
    lambda text: text.encode("utf-8", "surrogateescape")
)
changes = st.builds(
    Change,
    kind=st.sampled_from(Kind),
    path=raw_paths,
    is_dir=st.booleans(),
    old=raw_paths,
    target=raw_paths,
    writers=st.integers(0, 2),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(changes, st.sampled_from((0.0, 1.0, 700.0))), max_size=40))
def test_changes_that_make_no_sense_do_not_crash(sequence):
    world = World()
    for change, seconds in sequence:
        world.tell(change)
        world.wait(seconds)
    check_order(world.actions)
