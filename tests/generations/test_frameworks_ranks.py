"""One save of each framework whose ranks write files of their own, in the order it writes: closed by the right event,
mostly a tracker beside the save, and not one event earlier.
"""

from __future__ import annotations

from cachefs.generations.catalog import DEEPSPEED
from cachefs.generations.presets import from_config

from .world import TENSORS, ZIP, World, dcp_save

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


def test_saves_that_follow_one_another_within_the_quiet_time_all_close():
    """The tracker that named one of them names the next one: that takes nothing back."""
    world = World()
    steps = range(1, 4)
    for step in steps:
        deepspeed(world, step)
        world.put("run/latest", f"global_step{step}".encode())
        world.wait(2)
    assert not world.closes
    world.wait(31)
    assert world.closes == [(f"run/global_step{step}", "deepspeed", step) for step in steps]


def test_a_deletion_that_is_cut_short_does_not_leave_a_complete_save():
    """Rotation has begun to delete it before its time to close had come."""
    world = World()
    path = deepspeed(world)
    other = f"{path}/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    world.put(other, ZIP)
    world.put(f"{path}/lock.tmp")
    world.put("run/latest", b"global_step5")
    world.wait(1)
    world.unlink(f"{path}/lock.tmp")
    world.unlink(other)
    world.wait(1000)
    assert not world.closes
    assert "optim_states.pt was removed after the close signal" in world.detector.open_saves()[path.encode()]
    world.put(other, ZIP)
    world.wait(31)
    assert world.closes == [(path, "deepspeed", 5)]


def test_what_came_and_went_after_the_signal_is_not_missed():
    """Lock files, and temporary ones under a name that does not say so."""
    world = World()
    path = deepspeed(world)
    world.put("run/latest", b"global_step5")
    world.wait(1)
    world.put(f"{path}/scratch")
    world.unlink(f"{path}/scratch")
    world.wait(31)
    assert world.closes == [(path, "deepspeed", 5)]


def test_what_was_removed_before_the_last_word_of_the_tracker_is_not_missed():
    world = World()
    path = deepspeed(world)
    world.put(f"{path}/scratch")
    world.put("run/latest", b"global_step5")
    world.wait(1)
    world.unlink(f"{path}/scratch")
    world.wait(1)
    world.put("run/latest", b"global_step5")
    world.wait(31)
    assert world.closes == [(path, "deepspeed", 5)]


def test_megatron_saves_within_the_settle_time_all_close():
    world = World()
    for step in (100, 200):
        world.put(f"{megatron(world, step)}/metadata.json", b"{}")
        world.put(TRACKER, b"%d" % step)
    world.wait(6)
    assert [step for _, _, step in world.closes] == [100, 200]


def test_a_tracker_that_is_being_written_with_the_same_name_again_holds_nothing_back():
    """Every rank of nanotron writes it; one may be killed in the middle, and leave it empty."""
    world = World()
    path = deepspeed(world)
    world.put("run/latest", b"global_step5")
    world.wait(29)
    world.create("run/latest", b"")
    world.wait(2)
    assert world.closes == [(path, "deepspeed", 5)]


def test_nemo_marker_that_is_made_again_takes_the_close_back():
    """NeMo makes it before it deletes a checkpoint, too."""
    world = World()
    world.put(f"{NEMO}-unfinished", b"")
    dcp_save(world, f"{NEMO}/weights")
    world.put(f"{NEMO}/weights/metadata.json", b"{}")
    world.unlink(f"{NEMO}-unfinished")
    world.put(f"{NEMO}-unfinished", b"")
    world.wait(1000)
    assert not world.closes
    world.unlink(f"{NEMO}-unfinished")
    world.wait(6)
    assert world.closes == [(NEMO, "nemo", 9)]


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


def test_verl_saved_again_with_more_ranks():
    world = World()
    for ranks in (2, 4):
        for rank in range(2):
            world.put(f"v/global_step_5/actor/model_world_size_{ranks}_rank_{rank}.pt", ZIP)
        world.put("v/global_step_5/data.pt", ZIP)
        world.put("v/latest_checkpointed_iteration.txt", b"5")
    assert len(world.closes) == 1
    for rank in (2, 3):
        world.put(f"v/global_step_5/actor/model_world_size_4_rank_{rank}.pt", ZIP)
    assert len(world.closes) == 2


def test_verl_missing_rank():
    world = World()
    world.put("v/global_step_5/actor/model_world_size_2_rank_0.pt", ZIP)
    world.put("v/latest_checkpointed_iteration.txt", b"5")
    assert not world.closes
