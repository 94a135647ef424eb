"""Training loops without a framework: files, directories, presets of the user's, and what is no save."""

from __future__ import annotations

from cachefs.generations.catalog import select
from cachefs.generations.presets import from_config
from cachefs.staging.changes import Change, Kind

from .world import TENSORS, ZIP, World, dcp_save


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


def test_a_next_save_that_is_removed_has_started_all_the_same():
    world = World(select(["auto", "plain"]))
    world.put("r/step_10/model.pt", ZIP)
    world.put("r/step_20/model.pt", ZIP)
    world.rmtree("r/step_20")
    world.wait(11)
    assert world.closes == [("r/step_10", "plain", 10)]


def test_the_saves_after_the_next_one_do_not_prove_what_is_left_of_a_deletion():
    world = World(select(["auto", "plain"]))
    world.put("r/step_10/model.pt", ZIP)
    world.put("r/step_10/optim.pt", ZIP)
    for step in (20, 30):
        world.put(f"r/step_{step}/model.pt", ZIP)
        world.wait(1)
        if step == 20:
            world.unlink("r/step_10/optim.pt")
    world.wait(1000)
    assert world.closes == [("r/step_20", "plain", 20)]


def test_plain_directory_with_a_torn_file_stays_open():
    world = World(select(["auto", "plain"]))
    world.put("r/step-10/model.pt", ZIP[:60])
    world.put("r/step-20/model.pt", ZIP)
    world.wait(1000)
    assert not world.closes


def test_files_that_no_preset_in_use_knows_are_said_to_be_unknown():
    """The name is one of several presets, the files of none: without a word the save would stay open for ever."""
    world = World()
    world.put("r/step_10/model.safetensors", TENSORS)
    said = world.detector.open_saves()[b"r/step_10"]
    assert said.startswith("no preset in use knows these files")
    assert "cachefs close" in said
    assert "add `plain`" in said
    world.put("r/step_10/recipe_state.pt", ZIP)  # torchtune
    assert "torchtune" in world.detector.open_saves()[b"r/step_10"]
    world.unlink("r/step_10/recipe_state.pt")
    assert world.detector.open_saves()[b"r/step_10"].startswith("no preset in use knows these files")
    known = World(select(["auto", "plain"]))
    known.put("r/step_10/model.safetensors", TENSORS)
    assert known.detector.open_saves()[b"r/step_10"] == "the close signal"


def test_how_long_an_open_save_was_left_alone():
    world = World()
    assert world.detector.least_recent() is None
    world.put("r/step-1/__0_0.distcp")
    world.wait(50)
    world.put("r/step-2/__0_0.distcp")
    world.wait(50)
    assert world.detector.least_recent() == world.now - 100
    dcp_save(world, "r/step-1")
    assert world.detector.least_recent() == world.now - 50


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


def test_loose_files_that_are_open():
    """Logs are mirrored while they are written; what belongs to a save, or has a temporary name, is not."""
    world = World()
    log = world.create("r/events.out.tfevents.1")
    world.create("r/step-5/__0_0.distcp")
    world.create("r/notes.txt.tmp")
    world.put("r/closed.txt", b"x")
    assert world.detector.open_loose() == [b"r/events.out.tfevents.1"]
    log.close()
    assert world.detector.open_loose() == []


def test_loose_files_stay_loose():
    world = World()
    world.put("r/progress.txt")
    world.put("r/events.out.tfevents.1")
    world.put("training_args.bin")
    world.tell(Change(Kind.MADE_DIR, b"r/step-1", is_dir=True))
    assert world.loose == ["r/progress.txt", "r/events.out.tfevents.1", "training_args.bin"]
    assert not world.opens
