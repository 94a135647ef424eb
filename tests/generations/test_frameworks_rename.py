"""One save of each framework that writes under another name and renames, in the order it writes: closed by the right
event, and not one event earlier.
"""

from __future__ import annotations

import pytest

from cachefs.generations.catalog import AUTO, BUILTIN

from .world import ZIP, World, dcp_save


def test_nvrx_local():
    world = World()
    world.put("s/0/iter_0000007_0_local.dirty.pt", ZIP)
    world.wait(100)
    assert not world.opens
    world.rename("s/0/iter_0000007_0_local.dirty.pt", "s/0/iter_0000007_0_local.pt")
    assert world.closes == [("s/0/iter_0000007_0_local.pt", "nvrx-local", 7)]


def orbax(world, temp):
    for _ in range(3):
        world.put(f"{temp}/_CHECKPOINT_METADATA")
    item = f"{temp}/default.orbax-checkpoint-tmp"
    world.put(f"{item}/ocdbt.process_0/d/abc")
    world.put(f"{item}/manifest.ocdbt.__lock")
    world.rename(f"{item}/manifest.ocdbt.__lock", f"{item}/manifest.ocdbt")
    world.put(f"{item}/_METADATA")
    world.put(f"{item}/commit_success.txt")
    world.rename(item, f"{temp}/default")
    world.put(f"{temp}/commit_success.txt")


def test_orbax_closes_on_the_rename():
    world = World()
    orbax(world, "ck/10.orbax-checkpoint-tmp")
    world.wait(1000)
    assert not world.closes
    assert world.opens == ["ck/10.orbax-checkpoint-tmp"]
    world.rename("ck/10.orbax-checkpoint-tmp", "ck/10")
    assert world.closes == [("ck/10", "orbax", 10)]


def test_orbax_trash_is_no_new_generation():
    world = World()
    orbax(world, "ck/10.orbax-checkpoint-tmp-123")
    world.rename("ck/10.orbax-checkpoint-tmp-123", "ck/10")
    world.rename("ck/10", "ck/trash/10")
    assert len(world.opens) == 1
    assert len(world.closes) == 1


@pytest.mark.parametrize("presets", [AUTO, (BUILTIN["orbax-commit"],)])
def test_orbax_commit_file(presets):
    world = World(presets)
    world.put("ck/10/_CHECKPOINT_METADATA")
    world.put("ck/10/default/_METADATA")
    world.put("ck/10/default/commit_success.txt")
    world.wait(1000)
    assert not world.closes
    world.put("ck/10/commit_success.txt")
    assert [(path, step) for path, _, step in world.closes] == [("ck/10", 10)]


def test_olmo_closes_on_the_rename():
    world = World()
    world.put("o/step10-tmp/model.pt", ZIP)
    world.put("o/step10-tmp/config.yaml")
    world.wait(1000)
    assert not world.closes
    world.rename("o/step10-tmp", "o/step10")
    assert world.closes == [("o/step10", "olmo", 10)]
    world.symlink("step10", "o/latest")
    assert "o/latest" in world.loose


def test_olmo_core_async_rename_is_a_false_close():
    world = World()
    world.replace("o/step10-tmp/train/rank0.pt", ZIP)
    world.rename("o/step10-tmp", "o/step10")
    dcp_save(world, "o/step10/model_and_optim")
    world.wait(1000)
    assert not world.closes
    world.replace("o/step10/.metadata.json", b"{}")
    world.put("o/step10/config.json")
    world.wait(4)
    assert not world.closes
    world.wait(2)
    assert world.closes == [("o/step10", "olmo-core", 10)]


def test_olmo_core_sync():
    world = World()
    world.replace("o/step10-tmp/train/rank0.pt", ZIP)
    dcp_save(world, "o/step10-tmp/model_and_optim")
    world.rename("o/step10-tmp", "o/step10")
    world.wait(1000)
    assert not world.closes
    world.replace("o/step10/.metadata.json", b"{}")
    world.wait(6)
    assert world.closes == [("o/step10", "olmo-core", 10)]


def test_timm_links():
    world = World()
    world.put("t/tmp.pth.tar", ZIP)
    world.rename("t/tmp.pth.tar", "t/last.pth.tar")
    assert not world.closes
    world.link("t/last.pth.tar", "t/checkpoint-3.pth.tar")
    assert world.closes == [("t/checkpoint-3.pth.tar", "timm", 3)]
