"""One save of each framework, in the order it writes: closed by the right event, and not one event earlier."""

from __future__ import annotations

import json

import pytest

from cachefs.generations.catalog import AUTO, BUILTIN, DCP_LOCAL, DEEPSPEED, select
from cachefs.generations.presets import from_config
from cachefs.staging.changes import Change, Kind

from .world import TENSORS, ZIP, World, dcp_metadata, dcp_save

INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()


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
    (preset,) = from_config([{"name": "dcp-local", **_fields(DCP_LOCAL), "ranks": 2}])
    world = World((preset,))
    world.put("run/10/__0_0.distcp")
    world.put("run/10/__0.metadata")
    world.wait(1000)
    assert not world.closes
    world.put("run/10/__1.metadata")
    assert not world.closes
    world.wait(61)
    assert world.closes == [("run/10", "dcp-local", 10)]


def _fields(preset):
    return {
        "pattern": preset.pattern,
        "close": [{"on": signal.on, "names": list(signal.names)} for signal in preset.close],
        "strength": preset.strength,
        "rank_files": list(preset.rank_files),
        "evidence": list(preset.evidence),
        "generic": preset.generic,
        "quiet": preset.quiet,
    }


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


TRACKER = "run/latest_checkpointed_iteration.txt"


def megatron(world, step=100):
    path = f"run/iter_{step:07d}"
    world.put(f"{path}/common.pt", ZIP)
    dcp_save(world, path)
    return path


def test_megatron_closes_on_the_tracker_and_takes_the_tokenizer_along():
    world = World()
    path = megatron(world)
    world.wait(1000)
    assert not world.closes, ".metadata closes nothing here"
    world.put(f"{path}/metadata.json", b"{}")
    world.wait(1000)
    assert not world.closes
    tracker = world.create(TRACKER, b"")
    assert not world.closes, "the tracker is empty for a moment"
    tracker.write(b"100").close()
    assert not world.closes
    world.wait(1)
    world.put(f"{path}/tokenizer/tokenizer.json")
    world.wait(4.5)
    assert not world.closes, "the settle time starts again"
    world.wait(1)
    assert world.closes == [(path, "megatron", 100)]
    assert TRACKER in world.loose


def test_megatron_tracker_of_another_iteration():
    world = World()
    path = megatron(world)
    world.put(f"{path}/metadata.json", b"{}")
    world.put(TRACKER, b"90")
    world.wait(1000)
    assert not world.closes


def test_megatron_legacy_and_release():
    world = World()
    world.put("run/iter_0000050/mp_rank_00/model_optim_rng.pt", ZIP)
    world.put("run/release/mp_rank_00/model_optim_rng.pt", ZIP)
    world.put(TRACKER, b"50")
    world.wait(31)
    assert world.closes == [("run/iter_0000050", "megatron-legacy", 50)]
    world.put(TRACKER, b"release")
    world.wait(31)
    assert world.closes[1:] == [("run/release", "megatron-release", None)]


def test_a_directory_named_release_is_nothing_special():
    world = World()
    dcp_save(world, "release/exp/step-1")
    assert world.closes == [("release/exp/step-1", "torchtitan", 1)]


def test_nvrx_local():
    world = World()
    world.put("s/0/iter_0000007_0_local.dirty.pt", ZIP)
    world.wait(100)
    assert not world.opens
    world.rename("s/0/iter_0000007_0_local.dirty.pt", "s/0/iter_0000007_0_local.pt")
    assert world.closes == [("s/0/iter_0000007_0_local.pt", "nvrx-local", 7)]


NEMO = "log/checkpoints/llama--val_loss=0.10-step=9-consumed_samples=80.0"


def test_nemo_closes_when_the_marker_goes():
    world = World()
    world.put(f"{NEMO}-unfinished", b"")
    dcp_save(world, f"{NEMO}/weights")
    world.put(f"{NEMO}/weights/metadata.json", b"{}")
    world.put(f"{NEMO}/context/model.yaml")
    world.wait(1000)
    assert not world.closes
    world.unlink(f"{NEMO}-unfinished")
    world.wait(6)
    assert world.closes == [(NEMO, "nemo", 9)]
    world.put(f"{NEMO}/context/late.yaml")
    assert len(world.opens) == 1


def test_nemo_marker_removed_after_a_deletion_closes_nothing():
    world = World()
    world.put(f"{NEMO}-unfinished", b"")
    dcp_save(world, f"{NEMO}/weights")
    world.rmtree(NEMO)
    assert world.cancels == [NEMO]
    world.unlink(f"{NEMO}-unfinished")
    world.wait(1000)
    assert not world.closes


def test_nemo_marker_removed_without_weights_closes_nothing():
    world = World()
    world.put(f"{NEMO}-unfinished", b"")
    world.put(f"{NEMO}/weights/__0_0.distcp")
    world.unlink(f"{NEMO}-unfinished")
    world.wait(1000)
    assert not world.closes


def deepspeed(world, step=5):
    path = f"run/global_step{step}"
    world.put(f"{path}/mp_rank_00_model_states.pt", ZIP)
    return path


def test_deepspeed_latest_comes_before_other_ranks_are_done():
    world = World()
    path = deepspeed(world)
    slow = world.create(f"{path}/zero_pp_rank_1_mp_rank_00_optim_states.pt", b"PK\x03\x04")
    world.put("run/zero_to_fp32.py")
    world.put("run/latest", b"global_step5")
    world.wait(300)
    assert not world.closes, "a rank still writes"
    slow.write(b"torn").close()
    world.wait(300)
    assert not world.closes, "a torn shard"
    world.put(f"{path}/zero_pp_rank_1_mp_rank_00_optim_states.pt", ZIP)
    world.wait(29)
    assert not world.closes
    world.wait(2)
    assert world.closes == [(path, "deepspeed", 5)]
    assert "run/zero_to_fp32.py" in world.loose


def test_deepspeed_with_configured_shards():
    preset = from_config(
        [
            {
                "name": "deepspeed",
                "pattern": DEEPSPEED.pattern,
                "close": [{"on": "parent-file", "names": ["latest"]}],
                "strength": "C",
                "rank_files": ["zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"],
                "ranks": 2,
            }
        ]
    )
    world = World(preset)
    path = deepspeed(world)
    world.put(f"{path}/zero_pp_rank_0_mp_rank_00_optim_states.pt", ZIP)
    world.put("run/latest", b"global_step5")
    world.wait(1000)
    assert not world.closes
    world.put(f"{path}/zero_pp_rank_1_mp_rank_00_optim_states.pt", ZIP)
    world.wait(31)
    assert len(world.closes) == 1


def test_fastpersist_closes_a_shard_three_times():
    world = World()
    path = deepspeed(world)
    shard = f"{path}/layer_00-model_states.pt"
    world.put(shard, ZIP[:512])
    world.put("run/latest", b"global_step5")
    world.wait(20)
    world.reopen(shard).write(ZIP[512:]).close()
    world.wait(20)
    world.reopen(shard).close()
    world.wait(20)
    assert not world.closes
    world.wait(11)
    assert len(world.closes) == 1


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
    world.put(f"{path}/trainer_state.json", b"{}")
    rank1 = world.create(f"{path}/rng_state_1.pth", ZIP)
    world.wait(60)
    assert not world.closes
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
    world.put(f"{path}/model-00001-of-00002.safetensors", TENSORS)
    world.wait(31)
    assert not world.closes, "one of two files of a counted set"
    world.put(f"{path}/model-00002-of-00002.safetensors", TENSORS)
    world.wait(31)
    assert len(world.closes) == 1


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


def test_accelerate_with_configured_ranks():
    fields = _fields(BUILTIN["accelerate"])
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


def test_nanotron():
    world = World()
    world.put("n/10/config.yaml")
    for rank in range(2):
        world.put(f"n/10/model/layer/w_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors", TENSORS)
    world.put("n/10/checkpoint_metadata.json")
    world.put("n/10/random/tp-0_dp-0_pp-0.pt", ZIP)
    world.wait(100)
    assert not world.closes
    world.put("n/latest.txt", b"10")
    world.put("n/10/model_config.json")
    world.put("n/10/random/tp-1_dp-0_pp-0.pt", ZIP)
    world.put("n/latest.txt", b"10")
    assert not world.closes
    world.wait(31)
    assert world.closes == [("n/10", "nanotron", 10)]
    assert not [path for path in world.opens if path != "n/10"]


def test_nanotron_grid_with_a_hole():
    world = World()
    world.put("n/10/model/w_pp-rank-0-of-1_tp-rank-0-of-2.safetensors", TENSORS)
    world.put("n/latest.txt", b"10")
    world.wait(1000)
    assert not world.closes


def test_verl():
    world = World()
    for rank in range(2):
        world.put(f"v/global_step_5/actor/model_world_size_2_rank_{rank}.pt", ZIP)
    world.put("v/global_step_5/data.pt", ZIP)
    world.wait(1000)
    assert not world.closes
    world.put("v/latest_checkpointed_iteration.txt", b"5")
    assert world.closes == [("v/global_step_5", "verl", 5)]


def test_verl_missing_rank():
    world = World()
    world.put("v/global_step_5/actor/model_world_size_2_rank_0.pt", ZIP)
    world.put("v/latest_checkpointed_iteration.txt", b"5")
    assert not world.closes


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


def test_timm_links():
    world = World()
    world.put("t/tmp.pth.tar", ZIP)
    world.rename("t/tmp.pth.tar", "t/last.pth.tar")
    assert not world.closes
    world.link("t/last.pth.tar", "t/checkpoint-3.pth.tar")
    assert world.closes == [("t/checkpoint-3.pth.tar", "timm", 3)]


def test_plain_loop_in_place():
    world = World()
    for _ in range(2):
        handle = world.create("r/model.pt", ZIP[:50])
        world.wait(1000)
        handle.write(ZIP[50:]).close()
    assert world.closes == [("r/model.pt", "single", None)] * 2


def test_plain_directories_close_when_the_next_starts():
    world = World(select(["auto", "plain"]))
    for step in (10, 20):
        world.put(f"r/step_{step}/model.pt", ZIP)
        world.wait(100)
        world.put(f"r/step_{step}/optim.pt", ZIP)
        world.wait(1000)
    assert world.closes == [("r/step_10", "plain", 10)]
    dcp_save(world, "r/step_30")
    world.wait(11)
    assert sorted(world.closes[1:]) == [("r/step_20", "plain", 20), ("r/step_30", "dcp", 30)]


def test_plain_directory_with_a_torn_file_stays_open():
    world = World(select(["auto", "plain"]))
    world.put("r/step-10/model.pt", ZIP[:60])
    world.put("r/step-20/model.pt", ZIP)
    world.wait(1000)
    assert not world.closes


def test_own_quiet_preset():
    table = {"name": "q", "pattern": "q(?P<step>[0-9]+)", "strength": "D", "quiet": 20, "close": [{"on": "quiet"}]}
    world = World(from_config([table]))
    world.put("r/q5/a")
    world.wait(15)
    world.put("r/q5/b")
    world.wait(15)
    assert not world.closes
    world.wait(6)
    assert world.closes == [("r/q5", "q", 5)]


def test_loose_files_stay_loose():
    world = World()
    world.put("r/progress.txt")
    world.put("r/events.out.tfevents.1")
    world.put("training_args.bin")
    world.tell(Change(Kind.MADE_DIR, b"r/step-1", is_dir=True))
    assert world.loose == ["r/progress.txt", "r/events.out.tfevents.1", "training_args.bin"]
    assert not world.opens
