"""Real S3 servers for tests, as processes of their own: moto and ministack.

    with running("moto") as server:
        store = server.store(server.bucket())

Each lives in its own virtual environment below `.envs/`, built on first use from its hash-locked requirements, because
their dependencies contradict ours. `python -m tests.servers install` only builds them. pytest fixtures: fixtures.py.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3

from cachefs.store.s3 import S3Store
from tests.servers.environments import install
from tests.servers.ports import free_port

NAMES = ("moto", "ministack")

_READY_SECONDS = 60
_READY_PATHS = {"moto": "/moto-api/", "ministack": "/_ministack/health"}
_RESET_PATHS = {"moto": "/moto-api/reset", "ministack": "/_ministack/reset"}


@dataclass(frozen=True)
class Server:
    """A running server. `environ` are the AWS_* variables that a child process needs to reach it."""

    name: str
    endpoint_url: str
    access_key: str = "test"
    secret_key: str = "test"
    region: str = "us-east-1"

    @property
    def environ(self) -> Mapping[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def session(self) -> Any:
        """Return a boto3 session with the server's credentials; shared, since making one is slow."""
        return _session(self.access_key, self.secret_key, self.region)

    def store(self, bucket: str, prefix: str = "", *, connections: int = 16) -> S3Store:
        """Return a store on a bucket; close it at the end."""
        return S3Store(bucket, prefix, endpoint_url=self.endpoint_url, connections=connections, session=self.session())

    def bucket(self, *, versioned: bool = True) -> str:
        """Make a fresh bucket and return its name."""
        name = f"test-{uuid4().hex[:16]}"
        client = self.session().client("s3", endpoint_url=self.endpoint_url)
        try:
            client.create_bucket(Bucket=name)
            if versioned:
                client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        finally:
            client.close()
        return name

    def forget(self) -> None:
        """Drop every bucket and all that is in them."""
        where = urlsplit(self.endpoint_url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_READY_SECONDS)
        try:
            connection.request("POST", _RESET_PATHS[self.name])
            status = connection.getresponse().status
        finally:
            connection.close()
        if status != 200:
            raise RuntimeError(f"{self.name} answered {status} when it should forget its buckets")


@lru_cache
def _session(access_key: str, secret_key: str, region: str) -> Any:
    return boto3.session.Session(aws_access_key_id=access_key, aws_secret_access_key=secret_key, region_name=region)


@contextmanager
def running(name: str) -> Iterator[Server]:
    """Run a server on a free port of the loopback until the block ends."""
    home = install(name)
    port = free_port()
    with open(home / "server.log", "wb") as log:
        process = subprocess.Popen(
            _command(name, home, port),
            env={**os.environ, **_environment(name, port)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_ready(name, port, process, home / "server.log")
        yield Server(name, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(name: str, home: Path, port: int) -> list[str]:
    if name == "moto":
        return [str(home / "bin/moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    return [str(home / "bin/ministack")]


def _environment(name: str, port: int) -> dict[str, str]:
    return {"GATEWAY_PORT": str(port)} if name == "ministack" else {}


def _await_ready(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not _answers(port, _READY_PATHS[name]):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not come up:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
