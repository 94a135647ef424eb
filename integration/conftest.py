"""Fixtures of the integration tests."""

from __future__ import annotations

from integration.world import world
from tests.servers.fixtures import ministack_server, moto_server

__all__ = ["ministack_server", "moto_server", "world"]
