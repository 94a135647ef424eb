"""What goes wrong around saves: re-saves, rotation, open files, renames, single files, hands, restarts."""

from __future__ import annotations

import pytest

from cachefs.errors import InvalidError
from cachefs.generations.actions import CancelSave, CloseSave, Held, OpenSave, Proved, ResumedSave
from cachefs.generations.detector import Detector
from cachefs.generations.placement import Placer
from cachefs.generations.presets import from_config
from cachefs.generations.signals import marker_paths
from cachefs.staging.changes import Change, Kind

from .world import TENSORS, ZIP, Handle, World, dcp_metadata, dcp_save

STEP = "run/step-5"


def test_resave_in_place_is_a_new_save_and_the_old_marker_closes_nothing():
    world = World()
    dcp_save(world, STEP)
    dcp_save(world, STEP, close=False)
    world.wait(10_000)
    assert len(world.opens) == 2
    assert len(world.closes) == 1
    dcp_save(world, STEP)
    assert len(world.closes) == 2


def test_resave_with_a_smaller_world_leaves_stale_and_empty_shards():
    world = World()
    dcp_save(world, STEP, ranks=4)
    world.put(f"{STEP}/__9_0.distcp", b"")
    dcp_save(world, STEP, ranks=1)
    assert len(world.closes) == 2


def test_resave_that_begins_with_new_names_is_not_complete_without_them():
    """The first of its files that the old save had too may be the marker."""
    world = World()
    dcp_save(world, STEP, ranks=1)
    world.put(f"{STEP}/__1_0.distcp")
    world.put(f"{STEP}/.metadata.tmp", dcp_metadata("__1_0.distcp", "__2_0.distcp"))
    world.rename(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    assert (len(world.opens), len(world.closes)) == (2, 1)
    world.put(f"{STEP}/__2_0.distcp")
    assert len(world.closes) == 2


def test_same_name_every_time():
    world = World()
    for _ in range(3):
        dcp_save(world, "run/checkpoint")
    assert world.closes == [("run/checkpoint", "dcp", None)] * 3


def test_rotation_of_a_closed_save_says_nothing():
    world = World()
    dcp_save(world, STEP)
    before = len(world.actions)
    world.rmtree(STEP)
    assert world.actions[before:] == []
    dcp_save(world, STEP)
    assert len(world.closes) == 2


def test_rotation_of_an_open_save_cancels_it():
    world = World()
    dcp_save(world, STEP, close=False)
    world.rmtree(STEP)
    assert world.cancels == [STEP]
    assert not world.detector.open_saves()


def test_addendum_opens_nothing_but_a_recreated_file_does():
    world = World()
    dcp_save(world, STEP)
    world.put(f"{STEP}/notes.json")
    world.put(f"{STEP}/notes.json")
    assert len(world.opens) == 1
    world.unlink(f"{STEP}/__0_0.distcp")
    assert len(world.opens) == 1
    world.put(f"{STEP}/__0_0.distcp")
    assert len(world.opens) == 2


def test_addendum_that_carries_a_close_signal():
    world = World()
    dcp_save(world, STEP)
    world.put(f"{STEP}/model.safetensors.index.json", b'{"weight_map": {}}')
    assert len(world.opens) == 2
    assert len(world.closes) == 2


def test_marker_before_data_waits_for_the_data():
    world = World()
    late = world.create(f"{STEP}/__0_0.distcp")
    world.put(f"{STEP}/.metadata.tmp", dcp_metadata("__0_0.distcp"))
    world.rename(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    world.wait(599)
    assert not world.closes
    late.close()
    assert world.closes == [(STEP, "torchtitan", 5)]


def test_open_file_past_the_deadline_abandons_and_is_named():
    world = World(open_deadline=60.0)
    world.create(f"{STEP}/__0_0.distcp")
    world.put(f"{STEP}/.metadata.tmp", dcp_metadata())
    world.rename(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    assert world.detector.next_deadline() == world.now + 60
    world.wait(61)
    assert world.abandoned[0][0] == STEP
    assert "run/step-5/__0_0.distcp" in world.abandoned[0][1]
    dcp_save(world, "run/step-6")
    assert len(world.closes) == 1


def test_file_closed_under_another_name_than_it_was_opened():
    world = World()
    shard = world.create(f"{STEP}/.tmpX")
    world.rename(f"{STEP}/.tmpX", f"{STEP}/__0_0.distcp")
    dcp_metadata_now(world)
    assert not world.closes
    shard.close()
    assert len(world.closes) == 1


def dcp_metadata_now(world, path=STEP):
    world.put(f"{path}/.metadata.tmp", dcp_metadata("__0_0.distcp"))
    world.rename(f"{path}/.metadata.tmp", f"{path}/.metadata")


def test_directory_renamed_above_an_open_file():
    world = World()
    shard = world.create("run/foo.tmp/__0_0.distcp")
    dcp_metadata_now(world, "run/foo.tmp")
    world.rename("run/foo.tmp", "run/foo")
    assert not world.closes
    shard.close()
    assert world.closes == [("run/foo", "dcp", None)]
    assert world.moves == [("run/foo.tmp", "run/foo")]


def test_run_directory_renamed():
    world = World()
    dcp_save(world, "old/step-1")
    shard = world.create("old/step-2/__0_0.distcp")
    world.rename("old", "new")
    assert world.moves == [("old/step-2", "new/step-2")]
    shard.close()
    dcp_metadata_now(world, "new/step-2")
    assert world.closes[-1] == ("new/step-2", "torchtitan", 2)
    dcp_save(world, "new/step-1")
    assert len(world.opens) == 3


def test_two_handles_of_one_file():
    world = World()
    first = world.create(f"{STEP}/__0_0.distcp")
    second = world.reopen(f"{STEP}/__0_0.distcp")
    dcp_metadata_now(world)
    first.close()
    assert not world.closes
    second.close()
    assert len(world.closes) == 1


def test_closed_event_that_still_counts_writers():
    world = World()
    world.create(f"{STEP}/__0_0.distcp")
    world.tell(Change(Kind.CLOSED, f"{STEP}/__0_0.distcp".encode(), writers=1))
    assert list(world.detector._files.below(STEP.encode()))


def test_hard_link_of_an_open_file():
    world = World()
    handle = world.create("run/a.bin")
    world.link("run/a.bin", f"{STEP}/__0_0.distcp")
    dcp_metadata_now(world)
    assert not world.closes
    handle.close()
    assert len(world.closes) == 1


def test_nested_generations_are_one():
    world = World()
    dcp_save(world, "out/checkpoint-5/global_step5")
    dcp_save(world, "out/checkpoint-5/step-7/step-8")
    assert world.opens == ["out/checkpoint-5"]
    assert not world.closes


def test_save_into_the_run_directory_does_not_swallow_the_run():
    world = World()
    dcp_save(world, "run")
    dcp_save(world, "run/step-5")
    dcp_save(world, "run/step-6")
    assert [path for path, _, _ in world.closes] == ["run", "run/step-5", "run/step-6"]
    dcp_save(world, "run")
    assert len(world.closes) == 3, "a directory around generations is a run"


def test_single_file_inside_a_directory_that_becomes_a_generation():
    world = World()
    torn = world.create("ck/extra.pt", b"PK\x03\x04")
    dcp_save(world, "ck")
    assert "ck/extra.pt" in world.cancels
    assert not world.closes
    torn.close()
    assert world.closes == [("ck", "dcp", None)]


def test_slow_directory_names_of_job_ids():
    world = World()
    world.put("4711/checkpoint-5/model.safetensors", TENSORS)
    assert world.opens == ["4711/checkpoint-5"]


def test_trackers_moving_backwards_and_garbage():
    world = World()
    world.put("run/iter_0000100/mp_rank_00/a.pt", ZIP)
    for content in (b"", b"\xff\xfe", b"99", b"9" * 5000, b"checkpoint"):
        world.put("run/latest_checkpointed_iteration.txt", content)
    world.wait(1000)
    assert not world.closes
    world.put("run/latest_checkpointed_iteration.txt", b"100\n")
    world.put("run/latest_checkpointed_iteration.txt", b"90")
    world.wait(1000)
    assert world.closes == [("run/iter_0000100", "megatron-legacy", 100)], "it was named once"


def test_every_network_of_temporary_names_blocks_a_quiet_close():
    world = World()
    path = "out/checkpoint-1"
    world.put(f"{path}/trainer_state.json", b"{}")
    world.put(f"{path}/sub.orbax-checkpoint-tmp/x")
    world.wait(1000)
    assert not world.closes
    world.rename(f"{path}/sub.orbax-checkpoint-tmp", f"{path}/sub")
    world.wait(31)
    assert len(world.closes) == 1


@pytest.mark.parametrize(
    ("path", "marker", "torn", "whole"),
    [
        ("ck/last.ckpt", "meta.pt", ZIP[:60], ZIP),
        ("out/checkpoint-1", "trainer_state.json", b'{"epoch": 1,', b'{"epoch": NaN}\n'),
        ("ck/step-1", "model.safetensors.index.json", b'{"weight_map"', b'{"weight_map": {}}'),
    ],
)
def test_marker_whose_writer_was_killed(path, marker, torn, whole):
    world = World()
    world.put(f"{path}/x.bin")
    world.put(f"{path}/{marker}", torn)
    world.wait(10_000)
    assert not world.closes
    world.put(f"{path}/{marker}", whole)
    world.wait(31)
    assert len(world.closes) == 1


# ---- single files


def test_torn_zip_is_never_closed():
    world = World()
    world.put("r/model.pt", ZIP[:-30])
    world.wait(100_000)
    assert world.incomplete == ["r/model.pt"]
    assert not world.closes
    world.put("r/model.pt", ZIP)
    assert world.closes == [("r/model.pt", "single", None)]
    assert len(world.opens) == 1


@pytest.mark.parametrize("data", [b"", TENSORS[:-1], bytes(len(TENSORS)), TENSORS[:5]])
def test_torn_safetensors_and_preallocated(data):
    world = World()
    world.put("r/model.safetensors", data)
    world.wait(100_000)
    assert not world.closes
    assert world.incomplete == ["r/model.safetensors"]


def test_legacy_torch_file_is_accepted_after_quiet():
    world = World()
    world.put("r/old.pt", b"\x80\x02legacy")
    world.wait(29)
    assert not world.closes
    world.wait(2)
    assert world.closes == [("r/old.pt", "single", None)]


def test_safetensors_renamed_while_open():
    world = World()
    handle = world.create("r/.tmpXY", TENSORS)
    world.rename("r/.tmpXY", "r/model.safetensors")
    assert not world.closes
    handle.close()
    assert world.closes == [("r/model.safetensors", "single", None)]
    assert not world.loose


def test_single_file_removed_or_renamed_while_torn():
    world = World()
    world.put("r/a.pt", ZIP[:40])
    world.unlink("r/a.pt")
    world.put("r/b.pt", ZIP[:40])
    world.rename("r/b.pt", "r/b.bin")
    world.put("r/c.pt", ZIP[:40])
    world.rename("r/c.pt", "r/d.pt")
    assert world.cancels == ["r/a.pt", "r/b.pt"]
    assert world.moves == [("r/c.pt", "r/d.pt")]
    assert "r/b.bin" in world.loose


def test_single_file_replaced_by_rename():
    world = World()
    for _ in range(2):
        world.replace("r/model_10.pt", ZIP)
    assert world.closes == [("r/model_10.pt", "single", 10)] * 2
    world.rename("r/model_10.pt", "r/model_20.pt")
    assert world.closes[-1] == ("r/model_20.pt", "single", 20)


def test_exchange_told_as_two_renames():
    world = World()
    world.put("r/a.pt", ZIP)
    open_b = world.create("r/b.pt", ZIP)
    a, b = b"r/a.pt", b"r/b.pt"
    world.files[a], world.files[b] = world.files[b], world.files[a]
    world.tell(Change(Kind.RENAMED, b, old=a, writers=0))
    world.tell(Change(Kind.RENAMED, a, old=b, writers=1))
    assert list(world.detector._files.below(b"r")) == [a]
    open_b.close()
    assert world.closes[-1][0] == "r/a.pt"


# ---- by hand


def test_close_by_hand():
    world = World()
    world.put("run/step-5/weights.bin")
    world._check(world.detector.close_now(b"run/step-5", world.now, world))
    assert world.closes == [(STEP, "manual", 5)]
    assert world.of(CloseSave)[0].signal == "closed by hand"


def test_close_by_hand_of_any_directory_waits_for_open_files():
    world = World(())
    handle = world.create("some/dir/weights.bin")
    world._check(world.detector.close_now(b"some/dir", world.now, world))
    assert world.opens == ["some/dir"]
    assert not world.closes
    handle.close()
    assert world.closes == [("some/dir", "manual", None)]
    world._check(world.detector.close_now(b"some/dir", world.now, world))
    assert len(world.closes) == 2


@pytest.mark.parametrize("path", [b"", b"run/step-5/inner", b"run"])
def test_close_by_hand_refuses_what_is_no_generation(path):
    world = World()
    world.put("run/step-5/inner/x")
    with pytest.raises(InvalidError):
        world.detector.close_now(path, world.now, world)


@pytest.mark.parametrize("path", ["r/model.pt", "r/some"])
def test_close_by_hand_refuses_what_holds_no_bytes(path):
    """Nothing is published of it; a file that somebody writes may yet get some, and so may another member's."""
    world = World()
    world.put("r/model.pt", b"")
    world.put("r/some/config", b"")
    with pytest.raises(InvalidError, match=f"{path} holds no bytes"):
        world.detector.close_now(path.encode(), world.now, world)
    assert not world.closes
    handle = world.create("r/some/weights", b"")
    world._check(world.detector.close_now(b"r/some", world.now, world))
    handle.write(b"x").close()
    assert world.closes == [("r/some", "manual", None)]
    others = World(alone=False)
    others.put("r/some/config", b"")
    others._check(others.detector.close_now(b"r/some", others.now, others))
    assert others.closes == [("r/some", "manual", None)]


def test_torn_file_closed_by_hand():
    world = World()
    world.put("r/model.pt", ZIP[:40])
    world._check(world.detector.close_now(b"r/model.pt", world.now, world))
    assert world.closes == [("r/model.pt", "single", None)]


# ---- restarts


def restart(world, baselines_at, closed=()):
    """Forget everything but the journal: the open saves with their baselines, and the closed ones."""
    saves = [ResumedSave(path, baselines) for path, baselines in baselines_at.items()]
    saves += [ResumedSave(path.encode(), closed=True) for path in closed]
    world.detector = Detector(Placer(world.presets), **world.options)
    world.actions.clear()
    world._check(world.detector.resume(saves, world, world.now))


def baselines(world, path):
    placement = Placer(world.presets).any(path.encode(), is_file=path.encode() in world.files)
    return {marker: world.identity(marker) for marker in marker_paths(placement)}


def test_signal_during_the_crash_closes_at_resume():
    world = World()
    base = baselines(world, STEP)
    dcp_save(world, STEP)
    restart(world, {STEP.encode(): base})
    assert world.closes == [(STEP, "torchtitan", 5)]


def test_a_writer_that_outlived_the_mount_holds_its_save_back_until_it_closes():
    """The kernel lets it write on; a save is not complete before, and its marker may be the file in question."""
    for held in ("__1_0.distcp", ".metadata"):
        world = World()
        base = baselines(world, STEP)
        dcp_save(world, STEP)
        written = [f"{STEP}/{held}".encode()]
        assert written[0] in world.files
        world.detector = Detector(Placer(world.presets), **world.options)
        world.actions.clear()
        resumed = ResumedSave(STEP.encode(), base, written=written)
        world._check(world.detector.resume([resumed], world, world.now))
        assert not world.closes
        world.tell(Change(Kind.CLOSED, written[0]))
        assert world.closes == [(STEP, "torchtitan", 5)]


@pytest.mark.parametrize("mapped", ["__1_0.distcp", ".metadata"])
def test_a_map_that_is_still_written_holds_its_save_back_until_it_ends(mapped):
    """Its file was closed, and nobody tells when the map ends: the tree is asked at the close, and the file watched."""
    world = World()
    dcp_save(world, STEP, close=False)
    world.put(f"{STEP}/.metadata.tmp", dcp_metadata("__0_0.distcp", "__1_0.distcp"))
    world.files[f"{STEP}/{mapped.replace('.metadata', '.metadata.tmp')}".encode()].mapped = True
    world.rename(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    assert not world.closes
    assert [action.paths for action in world.of(Held)] == [[f"{STEP}/{mapped}".encode()]]
    assert world.detector.open_saves()[STEP.encode()] == f"{STEP}/{mapped} to be closed"
    world.files[f"{STEP}/{mapped}".encode()].mapped = False
    world.tell(Change(Kind.CLOSED, f"{STEP}/{mapped}".encode()))
    assert world.closes == [(STEP, "torchtitan", 5)]


def test_a_map_that_never_ends_costs_its_save_at_the_deadline():
    world = World(open_deadline=600.0)
    dcp_save(world, STEP, close=False)
    world.files[f"{STEP}/__0_0.distcp".encode()].mapped = True
    world.put(f"{STEP}/.metadata.tmp", dcp_metadata("__0_0.distcp", "__1_0.distcp"))
    world.rename(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    world.wait(599)
    assert not world.abandoned
    world.wait(2)
    assert not world.closes
    assert "still open for writing 600 s later" in world.abandoned[0][1]


def test_old_marker_does_not_close_at_resume():
    world = World()
    dcp_save(world, STEP)
    base = baselines(world, STEP)
    dcp_save(world, STEP, close=False)
    restart(world, {STEP.encode(): base})
    world.wait(10_000)
    assert not world.closes
    dcp_save(world, STEP)
    assert world.cancels == [STEP], "superseded"
    assert world.opens == [STEP]
    assert len(world.closes) == 1


def test_tracker_and_guard_at_resume():
    world = World()
    path = "run/iter_0000100"
    world.put("run/latest_checkpointed_iteration.txt", b"90")
    base = baselines(world, path)
    dcp_save(world, path)
    world.put(f"{path}/metadata.json")
    restart(world, {path.encode(): base})
    world.wait(100)
    assert not world.closes
    world.put("run/latest_checkpointed_iteration.txt", b"100")
    restart(world, {path.encode(): base})
    world.wait(6)
    assert world.closes == [(path, "megatron", 100)]


@pytest.mark.parametrize("signal", ["tracker", "next save"])
def test_a_signal_after_the_kill_does_not_close_what_was_open_before_it(signal):
    """A rank that was refused while there was no mount may be missing in it."""
    world = World()
    path = "run/global_step5" if signal == "tracker" else "run/checkpoint_5"
    name = "mp_rank_00_model_states.pt" if signal == "tracker" else "random_states_0.pkl"
    base = baselines(world, path)
    world.put(f"{path}/{name}", ZIP)
    restart(world, {path.encode(): base})
    if signal == "tracker":
        world.put("run/latest", b"global_step5")
    else:
        world.put(f"run/checkpoint_6/{name}", ZIP)
    world.wait(1000)
    assert not world.closes
    world.put(f"{path}/{name}", ZIP)
    world.put("run/latest", b"global_step5")
    world.put("run/checkpoint_7/random_states_0.pkl")
    world.wait(1000)
    assert path in [closed for closed, _, _ in world.closes]


def test_removed_marker_at_resume():
    world = World()
    path = "log/m-step=9"
    world.put(f"{path}-unfinished", b"")
    base = baselines(world, path)
    dcp_save(world, f"{path}/weights")
    world.put(f"{path}/weights/metadata.json")
    restart(world, {path.encode(): base})
    assert not world.closes
    world.unlink(f"{path}-unfinished")
    restart(world, {path.encode(): base})
    world.wait(6)
    assert world.closes == [(path, "nemo", 9)]


def test_single_files_at_resume():
    world = World()
    world.put("r/a.pt", ZIP)
    world.put("r/b.pt", ZIP[:40])
    restart(world, {b"r/a.pt": {}, b"r/b.pt": {}})
    assert world.closes == [("r/a.pt", "single", None)]
    assert world.incomplete == ["r/b.pt"]


def test_closed_saves_are_remembered_over_a_restart():
    world = World()
    dcp_save(world, STEP)
    restart(world, {}, closed=[STEP])
    world.put(f"{STEP}/notes.txt")
    assert not world.opens
    world.create(f"{STEP}/__0_0.distcp")
    assert [type(action) for action in world.actions] == [OpenSave]


def test_what_a_tracker_said_of_a_save_is_told_once_and_again_under_its_real_name():
    """A save under a temporary name is not journaled yet."""
    table = {
        "name": "own", "pattern": "s(?P<step>[0-9]+)", "temp": "s(?P<step>[0-9]+)-new", "strength": "C",
        "close": [{"on": "parent-file", "names": ["latest"]}],
    }  # fmt: skip
    world = World(from_config([table]))
    world.put("run/s5-new/model.pt", ZIP)
    world.put("run/latest", b"5")
    assert not world.of(Proved)
    world.rename("run/s5-new", "run/s5")
    world.put("run/latest", b"5")
    assert world.of(Proved) == [Proved(b"run/s5", {"own": "latest names it"})]
    world.rename("run", "kept")
    assert world.of(Proved)[1:] == [Proved(b"kept/s5", {"own": "latest names it"})]
    world.wait(31)
    assert [path for path, _, _ in world.closes] == ["kept/s5"]


def test_temporary_name_finished_at_resume():
    world = World()
    world.put("o/step10/model.pt", ZIP)
    world.put("o/step10/config.yaml")
    world.detector = Detector(Placer(world.presets))
    world.actions.clear()
    world._check(world.detector.resume([ResumedSave(b"o/step10", opened_as=b"o/step10-tmp")], world, 0.0))
    assert world.closes == [("o/step10", "olmo", 10)]


def test_forget():
    world = World()
    dcp_save(world, STEP, close=False)
    world.detector.forget(STEP.encode())
    assert not world.detector.open_saves()
    world.put(f"{STEP}/x")
    assert len(world.opens) == 2


def test_several_members_are_not_asked_for_each_others_files():
    world = World(alone=False)
    world.put(f"{STEP}/__0_0.distcp")
    world.put(f"{STEP}/.metadata.tmp", dcp_metadata("__0_0.distcp", "__1_0.distcp"))
    world.rename(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    assert len(world.closes) == 1
    alone = World()
    alone.put(f"{STEP}/__0_0.distcp")
    alone.put(f"{STEP}/.metadata.tmp", dcp_metadata("__0_0.distcp", "__1_0.distcp"))
    alone.rename(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    assert not alone.closes
    assert "__1_0.distcp" in alone.detector.open_saves()[STEP.encode()]


def test_handles_of_removed_files_do_not_hold_a_save():
    world = World()
    handle = world.create(f"{STEP}/scratch")
    world.unlink(f"{STEP}/scratch")
    dcp_save(world, STEP)
    assert len(world.closes) == 1
    assert isinstance(handle, Handle)
    assert handle.close() == []


@pytest.mark.parametrize("temp", ["hf/.tmp-foo", "hf/checkpoint-80.tmp", "hf/.checkpoint-80.restoring-71c9/new"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_save_written_in_a_temporary_directory_is_one_save_when_that_is_renamed(temp, shards):
    world = World()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)] if shards == 2 else ["model.safetensors"]
    for name in [*names, "global_step80/extra.pt"]:
        world.put(f"{temp}/{name}", ZIP if name.endswith(".pt") else TENSORS)
    world.put(f"{temp}/trainer_state.json", b"{}")
    world.wait(1000)
    assert not world.closes
    assert not world.loose
    world.rename(temp, "hf/checkpoint-80")
    world.wait(31)
    assert world.closes == [("hf/checkpoint-80", "hf-trainer", 80)]
    assert not world.cancels


def test_a_directory_that_its_contents_make_a_generation_is_one_when_it_leaves_a_temporary_one():
    world = World()
    world.put("out/.final.restoring-71c9/new/!first.pt", ZIP)
    dcp_save(world, "out/.final.restoring-71c9/new")
    assert not world.opens
    world.rename("out/.final.restoring-71c9/new", "out/final")
    assert world.opens == ["out/final"]
    assert world.closes == [("out/final", "dcp", None)]
    world.rename("out/final", "out/.final.restoring-71ca/old")
    assert len(world.opens) == 1


def test_directory_built_elsewhere_and_moved_into_place():
    world = World()
    world.put("run/building/weights.bin")
    world.put("run/building/trainer_state.json", b"{}")
    world.rename("run/building", "run/checkpoint-5")
    world.wait(31)
    assert world.closes == [("run/checkpoint-5", "hf-trainer", 5)]
    assert not world.of(CancelSave)


def test_a_directory_that_came_late_and_went_is_nothing_the_next_save_waits_for():
    """As little as a file of it that was renamed out of the save."""
    world = World()
    dcp_save(world, STEP)
    world.put(f"{STEP}/optim/__0_0.distcp")
    world.put(f"{STEP}/optim/__1_0.distcp")
    world.unlink(f"{STEP}/optim/__0_0.distcp")
    world.rename(f"{STEP}/optim/__1_0.distcp", "aside")
    dcp_save(world, STEP)
    assert [path for path, _, _ in world.closes] == [STEP, STEP]
