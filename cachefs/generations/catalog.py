"""The built-in presets, and AUTO, the set that needs no configuration.

Facts (project, file, function) stand beside each preset. Order matters in one way only: a generic preset stands back
while an earlier one of the list applies to the same directory.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cachefs.config.schema import Config
from cachefs.errors import InvalidError
from cachefs.generations.presets import Preset, Signal, check, from_config

_DCP_RENAME = Signal("renamed-in", (".metadata",))
_DCP_FILES = ("__*_*.distcp", ".metadata", ".metadata.tmp")
# Directories that frameworks nest in a save; each holds a `.metadata` of its own that says nothing about the whole.
_NESTED = r"(?:pytorch_model_fsdp_\d+|optimizer_\d+|model_and_optim)$"
_TMP_DIR = r"(?:\.tmp.*|tmp-.*|.*?(?P<step>\d+)?(?:[-_.]tmp(?:[-_.].*)?|\.(?:partial|incomplete|inprogress)))"

# torch.distributed.checkpoint filesystem.py, _FileSystemWriter.finish: `.metadata.tmp`, fsync, unlink the old one,
# rename, inside the all-reduce that every rank of the group takes part in.
DCP = Preset(
    name="dcp",
    pattern=rf"(?!{_NESTED})(?:.*?(?P<step>\d+)|.*)",
    close=(_DCP_RENAME,),
    expected=("dcp",),
    evidence=_DCP_FILES,
    generic=True,
    temp=_TMP_DIR,
)
# The same with use_collectives=False: one `__{rank}.metadata` per rank and no global file.
DCP_LOCAL = Preset(
    name="dcp-local",
    pattern=r".*?(?P<step>\d+)",
    close=(Signal("closed-in", ("__*.metadata",)),),
    strength="D",
    rank_files=("__{rank}.metadata",),
    evidence=("__*.metadata", "__*_*.distcp"),
    generic=True,
    quiet=60.0,
)
# torchtitan components/checkpointer/dcp.py, CheckpointManager; the index is written last when last_save_in_hf is set.
TORCHTITAN = Preset(
    name="torchtitan",
    pattern=r"step-(?P<step>\d+)",
    close=(_DCP_RENAME, Signal("closed-in", ("model.safetensors.index.json",))),
    expected=("dcp", "index"),
    evidence=(*_DCP_FILES, "sharded/**", "model*.safetensors", "model.safetensors.index.json"),
)
_MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
# megatron/training/checkpointing.py, save_checkpoint: shards, `.metadata`, metadata.json, barrier, tracker, tokenizer/.
MEGATRON = Preset(
    name="megatron",
    pattern=r"iter_(?P<step>\d{7,})",
    close=(Signal("parent-file", (_MEGATRON_TRACKER,)),),
    strength="B",
    guards=("metadata.json",),
    expected=("dcp",),
    trackers=(_MEGATRON_TRACKER,),
)
# The formats without metadata.json (torch, torch_dcp, fsdp_dtensor): the tracker alone, so it waits for quiet.
MEGATRON_LEGACY = Preset(
    name="megatron-legacy",
    pattern=r"iter_(?P<step>\d{7,})",
    close=(Signal("parent-file", (_MEGATRON_TRACKER,)),),
    strength="C",
    expected=("dcp", "formats"),
    trackers=(_MEGATRON_TRACKER,),
)
# `release` is a common directory name, so it needs evidence.
MEGATRON_RELEASE = Preset(
    name="megatron-release",
    pattern="release",
    close=(Signal("parent-file", (_MEGATRON_TRACKER,)),),
    strength="C",
    expected=("dcp", "formats"),
    evidence=("__*_*.distcp", "mp_rank_*/**", "metadata.json", "common.pt"),
    generic=True,
    trackers=(_MEGATRON_TRACKER,),
)
# nvidia_resiliency_ext local_manager.py: exclusive create of `.dirty.pt`, rename.
NVRX_LOCAL = Preset(name="nvrx-local", kind="file", pattern=r"iter_(?P<step>\d{7,})_\d+_local\.pt")
# nemo/lightning/pytorch/callbacks/model_checkpoint.py: set_/remove_checkpoint_unfinished_marker. The same marker is
# removed after a deletion, so the guard must have been written in this save.
NEMO = Preset(
    name="nemo",
    pattern=r"(?!.*\.ckpt$)(?!.*-unfinished$).*step=(?P<step>\d+).*",
    close=(Signal("marker-removed", ("{name}-unfinished",)),),
    strength="B",
    guards=("weights/metadata.json",),
    evidence=("weights/**", "context/**"),
    expected=("dcp",),
)
# deepspeed/runtime/engine.py, save_checkpoint: rank 0 writes `latest` before the barrier, so it proves nothing about
# others.
DEEPSPEED = Preset(
    name="deepspeed",
    pattern=r"global_step(?P<step>\d+)",
    close=(Signal("parent-file", ("latest",)),),
    strength="C",
    expected=("formats",),
    evidence=("**/*_states.pt",),
    trackers=("latest", "zero_to_fp32.py"),
)
# transformers/trainer.py, _save_checkpoint: trainer_state.json is rank 0's last file; no barrier before it.
HF_TRAINER = Preset(
    name="hf-trainer",
    pattern=r"checkpoint-(?P<step>\d+)",
    close=(Signal("closed-in", ("trainer_state.json",)),),
    strength="C",
    blocked_by=("checkpoint-is-incomplete.txt",),
    expected=("dcp", "index", "names", "formats"),
    rank_files=("rng_state_{rank}.pth",),
    evidence=("trainer_state.json",),
)
# 4.36.2 to 4.38: everyone waits, then `tmp-checkpoint-N` becomes `checkpoint-N`.
HF_TRAINER_TMP = Preset(
    name="hf-trainer-tmp",
    pattern=r"checkpoint-(?P<step>\d+)",
    close=(Signal("renamed-dir"),),
    guards=("trainer_state.json",),
    evidence=("trainer_state.json",),
    temp=r"tmp-checkpoint-(?P<step>\d+)",
)
# accelerate/accelerator.py, save_state: no marker at all. The next save of the run proves that this one returned.
ACCELERATE = Preset(
    name="accelerate",
    pattern=r"checkpoint_(?P<step>\d+)",
    close=(Signal("next-save"), Signal("closed-in", ("random_states_*.pkl",))),
    strength="D",
    expected=("dcp", "index", "formats"),
    rank_files=("random_states_{rank}.pkl",),
    evidence=("random_states_*.pkl",),
    quiet=60.0,
)
# pytorch-lightning strategies/fsdp.py, model_parallel.py: DCP, then rank 0 writes meta.pt. `last.ckpt/` is rewritten
# in place.
LIGHTNING_SHARDED = Preset(
    name="lightning-sharded",
    pattern=r"(?:.*?step=(?P<step>\d+).*|.*)\.ckpt",
    close=(Signal("closed-in", ("meta.pt",)),),
    expected=("dcp",),
)
# The DeepSpeed strategy in the same kind of directory: tag and `latest` always say `checkpoint`, so only the event
# counts.
LIGHTNING_DEEPSPEED = Preset(
    name="lightning-deepspeed",
    pattern=LIGHTNING_SHARDED.pattern,
    close=(Signal("closed-in", ("latest",)),),
    strength="C",
    expected=("formats",),
    evidence=("checkpoint/**",),
)
# orbax _src/path/atomicity.py: AtomicRenameTemporaryPath, and CommitFileTemporaryPath on stores without rename.
_ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "*/_METADATA", "*/manifest.ocdbt", "*/ocdbt.process_*/**")
ORBAX = Preset(
    name="orbax",
    pattern=r"(?:.+_)?(?P<step>\d+)",
    close=(Signal("renamed-dir"), Signal("closed-in", ("commit_success.txt",))),
    evidence=(*_ORBAX_FILES, "commit_success.txt"),
    generic=True,
    temp=r"(?:.+_)?(?P<step>\d+)\.orbax-checkpoint-tmp.*",
)
ORBAX_COMMIT = Preset(
    name="orbax-commit",
    pattern=r"(?:.+_)?(?P<step>\d+)",
    close=(Signal("closed-in", ("commit_success.txt",)),),
    evidence=(*_ORBAX_FILES, "commit_success.txt"),
    generic=True,
)
# composer/callbacks/checkpoint_saver.py, _save_checkpoint: the link is re-made after the barrier of all ranks.
COMPOSER = Preset(
    name="composer",
    pattern=r"ep\d+-ba(?P<step>\d+)",
    close=(_DCP_RENAME, Signal("symlink", ("latest-rank*.pt",))),
    expected=("dcp",),
    trackers=("latest-rank*.pt",),
)
COMPOSER_FILE = Preset(
    name="composer-file", kind="file", pattern=r"ep\d+-ba(?P<step>\d+)-rank\d+\.pt", trackers=("latest-rank*.pt",)
)
# torchtune/training/checkpointing: recipe_state.pt is last in a synchronous save and first in an asynchronous one.
TORCHTUNE = Preset(
    name="torchtune",
    pattern=r"(?:epoch|step)_(?P<step>\d+)",
    close=(Signal("closed-in", ("recipe_state.pt",)), _DCP_RENAME),
    strength="C",
    expected=("dcp", "index", "names", "formats"),
    evidence=("recipe_state.pt",),
)
# OLMo olmo/checkpoint.py, Checkpointer._temporary_wd; config.yaml tells it from OLMo-core, whose rename closes nothing.
OLMO = Preset(
    name="olmo",
    pattern=r"step(?P<step>\d+)(?:-unsharded)?",
    close=(Signal("renamed-dir"),),
    guards=("config.yaml",),
    expected=("dcp",),
    temp=r"step(?P<step>\d+)(?:-unsharded)?-tmp",
    evidence=("config.yaml",),
    trackers=("latest", "latest-unsharded"),
)
# OLMo-core src/olmo_core/train/checkpoint.py, _save_metadata: `.metadata.json`, then config.json by a callback.
OLMO_CORE = Preset(
    name="olmo-core",
    pattern=r"step(?P<step>\d+)",
    close=(Signal("closed-in", (".metadata.json",)),),
    strength="B",
    expected=("dcp",),
    evidence=(".metadata.json", "train/*", "model_and_optim/*"),
    temp=r"step(?P<step>\d+)-tmp",
)
# nanotron src/nanotron/trainer.py, save_checkpoint: every rank rewrites latest.txt, slower ones still write
# random/*.pt.
NANOTRON = Preset(
    name="nanotron",
    pattern=r"(?P<step>\d+)",
    close=(Signal("parent-file", ("latest.txt",)),),
    strength="C",
    expected=("names", "formats"),
    evidence=("checkpoint_metadata.json", "model/**/*.safetensors", "model/*.safetensors"),
    generic=True,
    trackers=("latest.txt",),
)
# verl/trainer/ppo/ray_trainer.py, _save_checkpoint: the driver writes the tracker after every worker group returned.
VERL = Preset(
    name="verl",
    pattern=r"global_step_(?P<step>\d+)",
    close=(Signal("parent-file", (_MEGATRON_TRACKER,)),),
    expected=("dcp", "names"),
    evidence=("actor/**", "critic/**", "data.pt"),
    trackers=(_MEGATRON_TRACKER,),
)
# lingua/checkpoint.py: DCP, params.json, train_state_{dp}.json per rank, and no marker after them.
LINGUA = Preset(
    name="lingua",
    pattern=r"(?P<step>\d{10})",
    close=(_DCP_RENAME,),
    strength="D",
    expected=("dcp",),
    evidence=_DCP_FILES,
    generic=True,
    quiet=60.0,
)
TIMM = Preset(name="timm", kind="file", pattern=r"checkpoint-(?P<step>\d+)\.pth\.tar")
LIGHTNING = Preset(name="lightning", kind="file", pattern=r".*step=(?P<step>\d+).*\.ckpt")
# Only a number after one of these words is a step: `val=0.25`, `rank_3` and `-00001-of-00002` hold none.
_STEP_WORD = r"(?:global_?step|step|iter(?:ation)?|ckpt|checkpoint|epoch|model|state)"
_STEP = rf"(?:(?:.*[-_.])?{_STEP_WORD}[-_=]?)?(?P<step>\d+)"
# One of several files: of a counted set, of a rank (DeepSpeed, verl; not the rank of a LoRA), of a layer (DeepSpeed).
# Each by itself would be published as if it were the whole.
_SHARD = r".*\d-of-\d.*|(?:.*[-_.])?(?<!lora.)rank[-_]?\d.*|.*[-_](?:model|optim)_states\.pt"
SINGLE = Preset(
    name="single",
    kind="file",
    pattern=rf"(?!(?:{_SHARD})$)(?:{_STEP}|.*)\.(?:pt|ckpt|safetensors)",
)
# transformers/modeling_utils.py, save_pretrained: config.json, shards, then the index. A tokenizer follows.
# In a checkpoint the index stands in the middle, so this is for directories that no other preset knows. torch's
# HuggingFaceStorageWriter writes shards into `sharded/` first.
_HF_SHARDS = ("*-?????-of-?????.safetensors", "*model*-?????-of-?????.bin")
_HF_INDEX = ("*.safetensors.index.json", "*.bin.index.json")
HF_MODEL = Preset(
    name="hf-model",
    pattern=rf"(?!sharded$)(?:{_STEP}|.*)",
    close=(Signal("closed-in", _HF_INDEX),),
    strength="C",
    expected=("index", "names", "formats"),
    evidence=(*_HF_SHARDS, *_HF_INDEX, "sharded/*-?????-of-?????.safetensors"),
    generic=True,
    fallback=True,
    temp=_TMP_DIR,
)
# Hand-written loops that save several files into a directory per step. Nothing tells a finished save from one whose
# trainer died, but the start of the next one; so this is for loops that are known to be synchronous, and not in AUTO.
PLAIN = Preset(
    name="plain",
    pattern=rf"(?:.*[-_.])?{_STEP_WORD}[-_=]?(?P<step>\d+)",
    close=(Signal("next-save"),),
    strength="D",
    expected=("dcp", "index", "names", "formats"),
    evidence=("**/*.pt", "**/*.pth", "**/*.bin", "**/*.safetensors", "**/*.ckpt"),
    generic=True,
    quiet=10.0,
)

BUILTIN: dict[str, Preset] = {
    preset.name: check(preset)
    for preset in (
        TORCHTITAN, MEGATRON, MEGATRON_LEGACY, MEGATRON_RELEASE, NEMO, DEEPSPEED, HF_TRAINER, HF_TRAINER_TMP,
        ACCELERATE, LIGHTNING_SHARDED, LIGHTNING_DEEPSPEED, ORBAX, ORBAX_COMMIT, COMPOSER, TORCHTUNE, OLMO, OLMO_CORE,
        NANOTRON, VERL, LINGUA, DCP, DCP_LOCAL, HF_MODEL, NVRX_LOCAL, COMPOSER_FILE, TIMM, LIGHTNING, SINGLE, PLAIN,
    )
}  # fmt: skip
"""Every built-in preset by name."""

AUTO: tuple[Preset, ...] = tuple(
    preset for name, preset in BUILTIN.items() if name not in ("orbax-commit", "dcp-local", "plain")
)
"""The default set. `orbax` covers `orbax-commit`; `dcp-local` needs its rank count configured and
`plain` a loop that is known to be synchronous."""


def select(names: Iterable[str], own: Iterable[Preset] = ()) -> tuple[Preset, ...]:
    """Return the presets to use: the user's `own` first, then those of `names` (built-in names or `auto`), each once.

    An own preset replaces the built-in of the same name. Raises InvalidError for a name that does not exist.
    """
    out = {preset.name: preset for preset in own}
    for name in names:
        if name == "auto":
            for preset in AUTO:
                out.setdefault(preset.name, preset)
        elif name in BUILTIN:
            out.setdefault(name, BUILTIN[name])
        elif name not in out:
            raise InvalidError(f"no preset named {name!r}", hint=f"built in: auto, {', '.join(sorted(BUILTIN))}")
    return tuple(out.values())


def configured(config: Config) -> tuple[Preset, ...]:
    """Return the presets that a configuration asks for, with its times in place of their own. Raises InvalidError."""
    times = {"settle": config.settle, "quiet": config.quiet}
    changes = {name: value for name, value in times.items() if value is not None}
    chosen = select(config.presets, from_config(config.preset))
    return tuple(msgspec.structs.replace(preset, **changes) for preset in chosen)
