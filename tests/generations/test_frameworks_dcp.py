"""One save of each framework that saves with torch.distributed.checkpoint (DCP), in the order it writes: closed by the
right event, and not one event earlier.
"""

from __future__ import annotations

import pytest

from cachefs.generations.catalog import DCP_LOCAL
from cachefs.generations.presets import from_config

from .world import INDEX, TENSORS, ZIP, World, dcp_metadata, dcp_save, preset_fields


def test_dcp_closes_on_the_rename_of_metadata():
    world = World()
    a, b = world.create("run/save-10/__0_0.distcp"), world.create("run/save-10/__1_0.distcp")
    assert world.opens == ["run/save-10"]
    a.close(), b.close()
    world.put("run/save-10/.metadata.tmp", dcp_metadata("__0_0.distcp", "__1_0.distcp"))
    world.wait(10_000)
    assert not world.closes
    world.rename("run/save-10/.metadata.tmp", "run/save-10/.metadata")
    assert world.closes == [("run/save-10", "dcp", 10)]
    assert world.opens == ["run/save-10"]
    assert not world.loose


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("ckpt", None),
        ("run/final", None),
        ("run/10", 10),
        ("run/step_7", 7),
        ("run/step100", 100),
        ("run/checkpoint-5", 5),
        ("run/checkpoint_5", 5),
        ("run/epoch_2", 2),
        ("run/global_step5", 5),
        ("run/global_step_5", 5),
        ("run/exp_tmp1", 1),
    ],
)
def test_plain_dcp_in_any_directory(path, step):
    world = World()
    dcp_save(world, path)
    assert [(where, number) for where, _, number in world.closes] == [(path, step)]


def test_dcp_without_collectives_needs_its_ranks():
    (preset,) = from_config([{"name": "dcp-local", **preset_fields(DCP_LOCAL), "ranks": 2}])
    world = World((preset,))
    world.put("run/10/__0_0.distcp")
    world.put("run/10/__0.metadata")
    world.wait(1000)
    assert not world.closes
    world.put("run/10/__1.metadata")
    assert not world.closes
    world.wait(61)
    assert world.closes == [("run/10", "dcp-local", 10)]


def test_torchtitan():
    world = World()
    dcp_save(world, "dump/checkpoint/step-100", ranks=4)
    assert world.closes == [("dump/checkpoint/step-100", "torchtitan", 100)]


def test_torchtitan_last_save_in_hf_format():
    world = World()
    world.put("ck/step-9/sharded/shard-00001-model-00001-of-00001.safetensors", TENSORS)
    world.put("ck/step-9/model-00001-of-00002.safetensors", TENSORS)
    world.put("ck/step-9/model-00002-of-00002.safetensors", b"header only")
    world.reopen("ck/step-9/model-00002-of-00002.safetensors").write(b"more").close()
    world.wait(1000)
    assert not world.closes
    world.put("ck/step-9/model.safetensors.index.json", INDEX)
    assert world.closes == [("ck/step-9", "torchtitan", 9)]


def test_composer_sharded_and_file():
    world = World()
    dcp_save(world, "c/ep1-ba20")
    assert world.closes == [("c/ep1-ba20", "composer", 20)]
    world.symlink("ep1-ba20", "c/latest-rank0.pt")
    world.put("c/ep1-ba30-rank0.pt", ZIP)
    assert world.closes[1:] == [("c/ep1-ba30-rank0.pt", "composer-file", 30)]


def test_composer_link_names_the_directory():
    world = World()
    world.put("c/ep1-ba20/state.bin")
    world.symlink("ep1-ba10", "c/latest-rank0.pt")
    assert not world.closes
    world.symlink("ep1-ba20", "c/latest-rank0.pt")
    assert world.closes == [("c/ep1-ba20", "composer", 20)]


def test_torchtune_sync_and_async():
    world = World()
    world.put("o/epoch_0/model-00001-of-00001.safetensors", TENSORS)
    world.wait(100)
    world.put("o/epoch_0/recipe_state.pt", ZIP)
    world.wait(31)
    assert world.closes == [("o/epoch_0", "torchtune", 0)]
    world.put("o/epoch_1/recipe_state.pt", ZIP)
    shard = world.create("o/epoch_1/__0_0.distcp")
    world.wait(400)
    assert len(world.closes) == 1, "recipe_state.pt comes first in an asynchronous save"
    shard.close()
    world.wait(400)
    assert len(world.closes) == 1
    dcp_save(world, "o/epoch_1", ranks=1)
    world.put("o/epoch_1/recipe_state.pt", ZIP)
    world.wait(31)
    assert world.closes[1:] == [("o/epoch_1", "torchtune", 1)]


def test_lingua_waits_for_what_follows_metadata():
    world = World()
    dcp_save(world, "l/0000000100")
    world.put("l/0000000100/params.json")
    world.wait(50)
    world.put("l/0000000100/train_state_00000.json")
    world.wait(50)
    assert not world.closes
    world.wait(11)
    assert world.closes == [("l/0000000100", "lingua", 100)]
