"""Stand-ins for the classes in a DCP `.metadata` pickle, under torch's module path; torch itself is not needed."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from unittest.mock import patch


@dataclass(frozen=True)
class MetadataIndex:
    fqn: str
    offset: tuple[int, ...] | None = None
    index: int | None = None


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


@dataclass
class Metadata:
    state_dict_metadata: dict = field(default_factory=dict)
    planner_data: object = None
    storage_data: dict = field(default_factory=dict)


def metadata_pickle(names, protocol: int = 2, tensors: int = 3) -> bytes:
    """Pickle a Metadata whose storage_data spreads `tensors` tensors over each shard.

    Other tests of the process may have the real torch loaded: its modules are put aside meanwhile, and not changed.
    """
    parts = ("torch", "distributed", "checkpoint", "metadata")
    modules = {name: ModuleType(name) for name in accumulate(parts, "{}.{}".format)}
    module = modules[".".join(parts)]
    classes = (MetadataIndex, _StorageInfo, Metadata)
    try:
        for cls in classes:
            cls.__module__ = module.__name__
            setattr(module, cls.__name__, cls)
        storage = {
            MetadataIndex(f"layer.{index}.{name}"): _StorageInfo(name, index * 100, 100)
            for name in names
            for index in range(tensors)
        }
        with patch.dict(sys.modules, modules):
            return pickle.dumps(Metadata({"layer": "meta"}, None, storage), protocol)
    finally:
        for cls in classes:
            cls.__module__ = __name__
