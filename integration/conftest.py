"""Fixtures of the integration tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.disks import disk
from integration.node import Node, node
from integration.world import world
from tests.servers.fixtures import ministack_server, moto_server

__all__ = ["ministack_server", "moto_server", "world"]


@pytest.fixture(scope="module", params=["kernel", "python"])
def mounted(request, tmp_path_factory) -> Iterator[Node]:
    """A mount that publishes what the tests write, for all tests of the module that do not stop it."""
    root = tmp_path_factory.mktemp(request.param)
    (root / "store").mkdir()
    options = ("--data-path", request.param, "--early-upload-delay", "0.05")
    if request.param == "kernel" and os.geteuid() != 0:
        pytest.skip("the kernel data path needs root")
    with node(root, f"file://{root}/store", options=options) as one:
        yield one
        assert one.process is not None
        assert one.process.poll() is None, one.logged()
        assert "Traceback" not in one.logged()


@pytest.fixture
def mnt(mounted, request) -> Path:
    """An empty directory of the mount."""
    path = mounted.mnt / f"{request.node.originalname[5:60]}-{len(os.listdir(mounted.mnt))}.d"
    path.mkdir()
    return path


@pytest.fixture(params=["kernel", "python"])
def data_path(request) -> str:
    """Who moves the bytes of the mount."""
    return request.param


@pytest.fixture
def made(tmp_path, data_path) -> Iterator[Callable[..., Node]]:
    """Makes a node with a directory store that a test may stop and kill."""
    with ExitStack() as stack:

        def make(*options: str, on: str = "") -> Node:
            (tmp_path / "store").mkdir()
            one = Node(tmp_path, f"file://{tmp_path}/store", options=("--data-path", data_path, *options))
            if on:
                one.staging = stack.enter_context(disk(on, tmp_path)) / "staging"
            stack.callback(one.end)
            return one.start()

        yield make
