"""What the configuration of a mount makes of the parts: their store, and how they flush, test, publish and delete."""

from __future__ import annotations

from cachefs import __version__
from cachefs.config.schema import Config
from cachefs.flush.uploader import FlushSettings
from cachefs.publish import loading
from cachefs.publish.settings import Settings as PublishSettings
from cachefs.retention.plan import Policy
from cachefs.store.base import ObjectStore
from cachefs.store.open import open_store

RESTORE_WORKERS = 4
SPARE_REQUESTS = 8
"""Requests beside those of the uploads: pointers, manifests, listings."""


def threads(config: Config) -> int:
    """Return how many requests may be under way at once."""
    return config.upload_concurrency + RESTORE_WORKERS + SPARE_REQUESTS


def store_of(config: Config) -> ObjectStore:
    """Return the store of a configuration. Raises InvalidError."""
    return open_store(config.store, endpoint_url=config.endpoint_url, region=config.region, connections=threads(config))


def load_of(config: Config) -> loading.Load | None:
    """Return how a restored copy is loaded, None below the level `load`. Raises InvalidError."""
    if config.test_level != "load":
        return None
    return loading.configured(
        config.load_command,
        config.load_user,
        timeout=config.load_timeout,
        root=config.staging / "load",
        reserve=config.reserve,
    )


def flush_settings(config: Config) -> FlushSettings:
    """Return how this daemon flushes."""
    return FlushSettings(
        member=config.member,
        part_size=config.part_size,
        upload_concurrency=config.upload_concurrency,
        bandwidth=config.bandwidth,
    )


def publish_settings(config: Config, ranges: bool, incarnation: str) -> PublishSettings:
    """Return how this daemon (`incarnation`) publishes; `ranges`: whether the store honours ranges of a version."""
    members = config.membership
    return PublishSettings(
        member=members.name,
        host=members.name,
        writer=f"cachefs {__version__}",
        incarnation=incarnation,
        names=members.names,
        count=members.count,
        owner=members.owner,
        service=members.service,
        poll=config.pointer_poll,
        absent_after=config.member_settle,
        deadline=config.member_deadline,
        level="checksum" if config.test_level == "checksum" else "bytes",
        load=load_of(config),
        workers=RESTORE_WORKERS,
        ranges=ranges,
    )


def retention_policy(config: Config) -> Policy:
    """Return what garbage collection keeps."""
    return Policy(config.keep_last, config.keep_hourly, config.keep_daily, config.gc_grace)
