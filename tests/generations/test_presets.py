"""Presets: what the config may say, what is built in; and where the built-in names put a path."""

from __future__ import annotations

import re
import tomllib

import pytest

from cachefs.errors import InvalidError
from cachefs.generations.catalog import AUTO, BUILTIN, select
from cachefs.generations.placement import Placer
from cachefs.generations.presets import Preset, check, from_config, matches
from cachefs.generations.signals import marker_paths

OWN = """
[[preset]]
name = "mine"
pattern = "save_(?P<step>[0-9]+)"
strength = "B"
settle = 2
guards = ["config.json"]
trackers = ["CURRENT"]
[[preset.close]]
on = "parent-file"
names = ["CURRENT"]
"""


def test_own_preset_from_toml():
    (preset,) = from_config(tomllib.loads(OWN)["preset"])
    assert preset.name == "mine"
    assert preset.close[0].on == "parent-file"
    assert preset.settle == 2.0
    assert preset.match(b"save_12")["step"] == b"12"
    assert preset.match(b"save_12_old") is None


BASE = {"name": "x", "pattern": "x", "close": [{"on": "closed-in", "names": ["m"]}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "colour"),
        ({"strength": "E"}, "strength"),
        ({"name": "Bad Name"}, "name"),
        ({"pattern": "("}, "pattern is not a regular expression"),
        ({"pattern": ""}, "pattern is empty"),
        ({"temp": "["}, "temp is not a regular expression"),
        ({"close": []}, "close is empty"),
        ({"close": [{"on": "closed-in"}]}, "needs names"),
        ({"close": [{"on": "sometimes"}]}, "sometimes"),
        ({"close": [{"on": "renamed-dir"}]}, "needs temp"),
        ({"close": [{"on": "renamed-dir", "names": ["a"]}], "temp": "t"}, "takes no names"),
        ({"close": [{"on": "quiet"}]}, "strength D"),
        ({"kind": "file"}, "closes by itself"),
        ({"generic": True}, "needs evidence"),
        ({"fallback": True}, "only a generic preset"),
        ({"settle": -1}, "settle and quiet"),
        ({"strength": "C", "quiet": 0}, "quiet time"),
        ({"ranks": 0}, "ranks"),
        ({"rank_files": ["a"]}, "rank"),
        ({"quiet": "long"}, "quiet"),
    ],
)
def test_wrong_presets_are_refused(changes, message):
    with pytest.raises(InvalidError, match=re.escape(message)):
        from_config([{**BASE, **changes}])


def test_missing_and_double_names():
    with pytest.raises(InvalidError, match="number 1"):
        from_config([{"pattern": "x"}])
    with pytest.raises(InvalidError, match="twice"):
        from_config([BASE, BASE])


def test_builtins_are_sound_and_named_once():
    assert all(check(preset) is preset for preset in BUILTIN.values())
    assert {preset.name for preset in AUTO} <= set(BUILTIN)
    wanted = {
        "dcp", "dcp-local", "torchtitan", "megatron", "megatron-legacy", "nvrx-local", "nemo", "deepspeed",
        "hf-trainer", "hf-trainer-tmp", "accelerate", "lightning", "lightning-sharded", "orbax", "orbax-commit",
        "composer", "composer-file", "torchtune", "olmo", "olmo-core", "nanotron", "verl", "lingua", "timm", "hf-model",
    }  # fmt: skip
    assert wanted <= set(BUILTIN)


def test_select():
    own = from_config([{**BASE, "name": "dcp"}])
    assert select(["auto"]) == AUTO
    assert select(["dcp", "auto"], own)[0] is own[0]
    assert [preset.name for preset in select(["dcp", "auto"], own)].count("dcp") == 1
    assert [preset.name for preset in select(["orbax-commit", "dcp-local"])] == ["orbax-commit", "dcp-local"]
    with pytest.raises(InvalidError, match="no preset named 'dpc'"):
        select(["dpc"])


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("*.pt", b"a.pt", True),
        ("*.pt", b"d/a.pt", False),
        ("**/*.pt", b"a.pt", True),
        ("**/*.pt", b"d/e/a.pt", True),
        ("model/**", b"model/a/b", True),
        ("model/**", b"models/a", False),
        ("__?.metadata", b"__1.metadata", True),
        ("a.b", b"axb", False),
        ("*", b"\xff\n", True),
    ],
)
def test_globs(glob, path, expected):
    assert matches(path, [glob]) is expected


@pytest.mark.parametrize(
    ("path", "root", "run", "step"),
    [
        ("run/step-100/__0_0.distcp", "run/step-100", "run", 100),
        ("a/b/step-100/deep/er/x", "a/b/step-100", "a/b", 100),
        ("step-5/x", "step-5", "default", 5),
        ("ckpt/__0_0.distcp", "ckpt", "default", None),
        ("ck/ft-replicat-1/step-5/.metadata", "ck/ft-replicat-1/step-5", "ck/ft-replicat-1", 5),
        ("run/final.tmp/.metadata", "run/final.tmp", "run", None),
        ("run/step5-tmp/x", "run/step5-tmp", "run", 5),
        ("exp-tmp/step-5/x", "exp-tmp/step-5", "exp-tmp", 5),
        ("run/tmp-checkpoint-5/x", "run/tmp-checkpoint-5", "run", 5),
        ("run/0000000010/__0_0.distcp", "run/0000000010", "run", 10),
        ("run/checkpoint-9/global_step9/latest", "run/checkpoint-9", "run", 9),
        ("4711/checkpoint-9/x", "4711/checkpoint-9", "4711", 9),
        ("run/10/default/_METADATA", "run/10", "run", 10),
        ("run/model.pt", "run/model.pt", "run", None),
        ("model_100.pt", "model_100.pt", "default", 100),
        ("run/lora_rank_3.pt", "run/lora_rank_3.pt", "run", None),
        ("run/best-epoch=3-val=0.25.ckpt", "run/best-epoch=3-val=0.25.ckpt", "run", None),
        ("run/model.epoch_3.pt", "run/model.epoch_3.pt", "run", 3),
        ("run/300.pt", "run/300.pt", "run", 300),
        ("run/final/model-00001-of-00002.safetensors", "run/final", "run", None),
        ("run/final/pytorch_model-00001-of-00002.bin", "run/final", "run", None),
        ("run/final/sharded/shard-00001-model-00001-of-00002.safetensors", "run/final", "run", None),
        ("run/final-7b/model.safetensors.index.json", "run/final-7b", "run", None),
        ("run/epoch-3/model-00001-of-00002.safetensors", "run/epoch-3", "run", 3),
        ("run/ep1-ba5-rank0.pt", "run/ep1-ba5-rank0.pt", "run", 5),
        ("r\udcff%/step-1/x", "r\udcff%/step-1", "r%FF%25", 1),
    ],
)
def test_placement(path, root, run, step):
    placement = Placer(AUTO).place(path.encode("utf-8", "surrogateescape"))
    assert placement is not None
    assert placement.path == root.encode("utf-8", "surrogateescape")
    assert (placement.run, placement.step) == (run, step)


@pytest.mark.parametrize(
    "path",
    [
        "progress.txt", "run/latest", "run/events.out", "run/.tmpAB.safetensors", "run/x.pth", "run/pytorch_model.bin",
        "my/pytorch_model_fsdp_0/.metadata", "my/optimizer_0/__0_0.distcp", "10/config.yaml", "release/notes",
        "__0_0.distcp", "run/iter_0000001_0_local.dirty.pt",
        "run/rank_3.pt", "run/model_rank0.safetensors", "run/mp_rank_00_model_states.pt", "run/model-1-of-3.pt",
        "run/layer_01-model_states.pt", "run/model_world_size_8_rank_3.pt", "model-00001-of-00002.safetensors",
        "data/train-00001-of-00002.bin",
        "run/.tmp-foo/model.pt", "run/x.tmp/deep/model.pt", "run/.tmp-foo/checkpoint-5/config.json",
        "out/.checkpoint-5.restoring-71c9/new/model.pt", "out/.final.restoring-71c9/new/.metadata",
        "out/.checkpoint-9.restoring-71c9/new/global_step9/latest", "run/x.tmp/model/__0_0.distcp",
    ],
)  # fmt: skip
def test_loose_paths(path):
    assert Placer(AUTO).place(path.encode()) is None


def test_a_fallback_has_no_say_where_another_preset_knows_the_name():
    for name in ("checkpoint-5", "checkpoint_5", "step_5", "epoch_5", "global_step5"):
        placement = Placer(AUTO).place(f"run/{name}/model-00001-of-00002.safetensors".encode())
        assert "hf-model" not in [preset.name for preset in placement.candidates]


def test_what_is_mirrored_as_loose():
    placer = Placer(AUTO)
    assert placer.is_loose(b"run/progress.txt")
    assert placer.is_loose(b"run/rank_3.pt")
    for path in (
        b"run/model.pt",
        b"run/notes.tmp",
        b"run/.tmp-foo/rank_3.pt",
        b"out/.final.restoring-71c9/new/config.json",
    ):
        assert not placer.is_loose(path)


def test_default_run_and_relative():
    placer = Placer(AUTO, "exp")
    placement = placer.place(b"step-5/a/b")
    assert placement.run == "exp"
    assert placement.relative(b"step-5/a/b") == b"a/b"
    assert placer.place(b"x/m.pt").relative(b"x/m.pt") == b"m.pt"
    assert placer.place(b"step-5", is_dir=True).path == b"step-5"
    assert placer.place(b"run", is_dir=True) is None


def test_huge_step_is_no_step():
    assert Placer(AUTO).place(f"step-{'9' * 400}/x".encode()).step is None


def test_only_the_chosen_presets_count():
    placer = Placer(select(["megatron"]))
    assert placer.place(b"run/iter_0000100/x").step == 100
    assert placer.place(b"run/step-5/__0_0.distcp") is None
    assert placer.place(b"run/model.pt") is None


def test_marker_paths():
    placement = Placer(select(["nemo"])).directory(b"log/m-step=9")
    assert marker_paths(placement) == [b"log/m-step=9-unfinished", b"log/m-step=9/weights/metadata.json"]
    assert isinstance(placement.candidates[0], Preset)
    assert marker_paths(Placer(select(["dcp"])).directory(b"x")) == [b"x/.metadata"]
