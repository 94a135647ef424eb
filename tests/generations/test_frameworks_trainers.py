"""One save of each trainer (Hugging Face, Accelerate, Lightning), in the order it writes: closed by the right event,
and not one event earlier.
"""

from __future__ import annotations

import json

from cachefs.generations.catalog import BUILTIN
from cachefs.generations.presets import from_config

from .world import INDEX, TENSORS, ZIP, World, dcp_save, preset_fields


def hf(world, path="out/checkpoint-500"):
    world.put(f"{path}/config.json")
    temp = world.create(f"{path}/.tmpAbC", TENSORS)  # safetensors 0.8: renamed while it is open
    world.rename(f"{path}/.tmpAbC", f"{path}/model.safetensors")
    temp.close()
    world.put(f"{path}/optimizer.pt", ZIP)
    return path


def test_hf_trainer():
    world = World()
    path = hf(world)
    world.wait(1000)
    assert not world.closes
    assert world.detector.closing() == []
    world.put(f"{path}/trainer_state.json", b"{}")
    assert world.detector.closing() == [path.encode()], "it must only be quiet"
    rank1 = world.create(f"{path}/rng_state_1.pth", ZIP)
    world.wait(60)
    assert not world.closes
    assert world.detector.closing() == [path.encode()], "a file is still open"
    rank1.close()
    world.put(f"{path}/adapter/adapter_model.safetensors", TENSORS)
    world.wait(29)
    assert not world.closes
    world.wait(2)
    assert world.closes == [(path, "hf-trainer", 500)]
    assert world.opens == [path]


def test_hf_trainer_index_of_a_missing_shard():
    world = World()
    path = hf(world)
    world.put(f"{path}/model.safetensors.index.json", INDEX)
    world.put(f"{path}/trainer_state.json", b"{}")
    world.wait(1000)
    assert not world.closes
    assert "model-00001-of-00002.safetensors" in world.detector.open_saves()[path.encode()]
    assert world.detector.closing() == [], "time alone does not bring the shard"
    world.put(f"{path}/model-00001-of-00002.safetensors", TENSORS)
    world.wait(31)
    assert not world.closes, "one of two files of a counted set"
    world.put(f"{path}/model-00002-of-00002.safetensors", TENSORS)
    world.wait(31)
    assert len(world.closes) == 1


def save_pretrained(world, path, shards=3):
    """What `model.save_pretrained` and `tokenizer.save_pretrained` write, in their order."""
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    world.put(f"{path}/config.json")
    for name in names:
        world.put(f"{path}/{name}", TENSORS)
        world.wait(60)
    world.put(f"{path}/model.safetensors.index.json", json.dumps({"weight_map": dict(enumerate(names))}).encode())
    world.put(f"{path}/tokenizer.json")


def test_a_sharded_model_in_a_directory_of_any_name_is_one_save():
    world = World()
    save_pretrained(world, "hf3/final")
    assert not world.closes
    world.wait(31)
    assert world.closes == [("hf3/final", "hf-model", None)]
    assert world.opens == ["hf3/final"]


def test_a_sharded_model_without_its_index_is_never_complete():
    world = World()
    world.put("hf3/final/model-00001-of-00002.safetensors", TENSORS)
    world.put("hf3/final/model-00002-of-00002.safetensors", TENSORS)
    world.wait(1000)
    assert world.opens == ["hf3/final"]
    assert not world.closes


def test_an_index_in_the_middle_of_a_checkpoint_closes_nothing():
    world = World()
    save_pretrained(world, "out/checkpoint-5")
    save_pretrained(world, "out/checkpoint_5")
    world.wait(1000)
    assert not world.closes


def test_a_model_without_shards_is_its_file():
    world = World()
    world.put("hf3/final/config.json")
    world.put("hf3/final/model.safetensors", TENSORS)
    assert world.closes == [("hf3/final/model.safetensors", "single", None)]


def test_a_sharded_model_in_the_directory_of_a_run_does_not_swallow_its_checkpoints():
    world = World()
    world.put("out/model-00001-of-00002.safetensors", TENSORS)
    hf(world)
    assert world.opens == ["out", "out/checkpoint-500"]
    assert world.cancels == ["out"]
    world.put("out/checkpoint-500/trainer_state.json", b"{}")
    save_pretrained(world, "out")
    world.wait(31)
    assert world.closes == [("out/checkpoint-500", "hf-trainer", 500)]
    assert "out/model-00001-of-00003.safetensors" in world.loose


def test_a_sharded_model_in_the_directory_of_a_run_does_not_swallow_its_single_files():
    """Neither those that come after it, nor those before."""
    world = World()
    save_pretrained(world, "run")
    world.wait(31)
    names = ("step_100.pt", "last.ckpt", "step_200.pt", "last.ckpt")
    for name in names:
        world.put(f"run/{name}", ZIP)
    assert [path for path, _, _ in world.closes] == ["run", *(f"run/{name}" for name in names)]
    save_pretrained(world, "run")
    world.wait(31)
    assert len(world.closes) == 5
    assert not world.cancels
    assert "run/model-00001-of-00003.safetensors" in world.loose


def test_a_sharded_model_that_never_got_its_index_does_not_swallow_single_files():
    world = World()
    world.put("run/model-00001-of-00002.safetensors", TENSORS)
    world.put("run/step_100.pt", ZIP)
    assert world.cancels == ["run"]
    assert world.closes == [("run/step_100.pt", "single", 100)]


def test_a_checkpoint_that_is_written_beside_a_sharded_model_stays_a_save_of_its_own():
    world = World()
    file = world.create("run/step_100.pt", ZIP)
    world.put("run/model-00001-of-00002.safetensors", TENSORS)
    file.close()
    assert world.closes == [("run/step_100.pt", "single", 100)]


def test_files_without_a_step_are_part_of_the_sharded_model_that_they_lie_beside():
    world = World()
    world.put("run/adapter.pt", ZIP)
    save_pretrained(world, "run")
    world.put("run/optimizer.pt", ZIP)
    world.wait(31)
    assert world.closes == [("run/adapter.pt", "single", None), ("run", "hf-model", None)]


def test_hf_trainer_blocked_by_its_sentinel():
    world = World()
    path = "out/checkpoint-5"
    world.put(f"{path}/checkpoint-is-incomplete.txt")
    hf(world, path)
    world.put(f"{path}/trainer_state.json", b"{}")
    world.wait(1000)
    assert not world.closes
    world.unlink(f"{path}/checkpoint-is-incomplete.txt")
    world.wait(31)
    assert world.closes == [(path, "hf-trainer", 5)]


def test_hf_trainer_with_fsdp_and_deepspeed_nested():
    world = World()
    path = "out/checkpoint-5"
    dcp_save(world, f"{path}/pytorch_model_fsdp_0")
    dcp_save(world, f"{path}/optimizer_0")
    world.put(f"{path}/global_step5/mp_rank_00_model_states.pt", ZIP)
    world.put(f"{path}/latest", b"global_step5")
    world.wait(1000)
    assert world.opens == [path]
    assert not world.closes
    world.put(f"{path}/trainer_state.json", b"{}")
    world.wait(31)
    assert world.closes == [(path, "hf-trainer", 5)]


def test_hf_trainer_with_a_temporary_directory():
    world = World()
    hf(world, "out/tmp-checkpoint-5")
    world.put("out/tmp-checkpoint-5/trainer_state.json", b"{}")
    world.wait(1000)
    assert not world.closes
    world.rename("out/tmp-checkpoint-5", "out/checkpoint-5")
    assert world.moves == [("out/tmp-checkpoint-5", "out/checkpoint-5")]
    assert world.closes == [("out/checkpoint-5", "hf-trainer-tmp", 5)]


def test_accelerate_closes_when_the_next_save_starts():
    world = World()
    for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"):
        world.put(f"p/checkpoint_1/{name}", TENSORS if name.endswith("safetensors") else b"x")
    world.wait(10_000)
    assert not world.closes
    world.put("p/checkpoint_2/model.safetensors", TENSORS)
    world.wait(61)
    assert world.closes == [("p/checkpoint_1", "accelerate", 1)]


def test_accelerate_rank_that_is_late_does_not_replace_the_start_of_the_next_save():
    world = World()
    world.put("p/checkpoint_1/random_states_0.pkl")
    world.put("p/checkpoint_2/random_states_0.pkl")
    world.put("p/checkpoint_1/random_states_1.pkl")
    world.wait(61)
    assert world.closes == [("p/checkpoint_1", "accelerate", 1)]


def test_accelerate_with_configured_ranks():
    fields = preset_fields(BUILTIN["accelerate"])
    world = World(from_config([{"name": "accelerate", **fields, "ranks": 2}]))
    world.put("p/checkpoint_1/random_states_0.pkl")
    world.wait(1000)
    assert not world.closes
    world.put("p/checkpoint_1/random_states_1.pkl")
    world.wait(61)
    assert len(world.closes) == 1


def test_lightning_file_written_by_copy():
    world = World()
    handle = world.create("ck/epoch=0-step=2.ckpt", ZIP[:100])
    handle.write(ZIP[100:])
    assert not world.closes
    handle.close()
    assert world.closes == [("ck/epoch=0-step=2.ckpt", "lightning", 2)]


def test_lightning_last_is_overwritten_in_place():
    world = World()
    for _ in range(3):
        world.put("ck/last.ckpt", ZIP)
    assert world.closes == [("ck/last.ckpt", "single", None)] * 3
    assert len(world.opens) == 3


def test_lightning_last_as_a_link():
    world = World()
    world.put("ck/epoch=0-step=2.ckpt", ZIP)
    world.symlink("epoch=0-step=2.ckpt", "ck/last.ckpt")
    assert len(world.closes) == 1
    assert "ck/last.ckpt" in world.loose


def test_lightning_sharded_closes_on_meta_and_again_in_place():
    world = World()
    path = "ck/last.ckpt"
    for attempt in (1, 2):
        dcp_save(world, path)
        world.wait(1000)
        assert len(world.closes) == attempt - 1, "an old meta.pt proves nothing"
        meta = world.create(f"{path}/meta.pt", ZIP)
        assert len(world.closes) == attempt - 1
        meta.close()
        assert len(world.closes) == attempt
    assert world.closes == [(path, "lightning-sharded", None)] * 2


def test_lightning_with_deepspeed():
    world = World()
    path = "ck/epoch=0-step=2.ckpt"
    world.put(f"{path}/checkpoint/mp_rank_00_model_states.pt", ZIP)
    world.wait(1000)
    world.put(f"{path}/latest", b"checkpoint")
    world.wait(29)
    assert not world.closes
    world.wait(2)
    assert world.closes == [(path, "lightning-deepspeed", 2)]
