"""Every key in the bucket is built and parsed here.

    <prefix>/runs/<run>/pointer.json                            the one mutable object of a run
    <prefix>/runs/<run>/attempts/<attempt>/open.json            create-only, by the owner
                                          /shards/<member>/<shard>-<name>
                                          /close.json           create-only, by the member that saw the close signal
                                          /members/<member>.json
                                          /manifest.json        sealed under the epoch that opened the attempt
                                          /manifest-<epoch>.json  sealed again by a later owner that adopted it
                                          /tests/<epoch>/<member>.json   one member's share of the restore test
                                          /test.json, /test-<epoch>.json
                                          /abandoned.json       why it ended, for the other members
    <prefix>/runs/<run>/wanted/<attempt>.json                   create-only: a member has a save that nobody opened
    <prefix>/runs/<run>/leases/<lease>.json                     create-only: a reader that GC must wait for
    <prefix>/runs/<run>/loose/<path>                            overwritable, versioned
    <prefix>/.probe/<id>/...                                    the store probe

A run is a directory path, so `<run>` may hold `/`. Each of its components is percent-encoded outside
`A-Za-z0-9-._=+,@~`; a component that would read as one of our own names (`attempts`, `loose`, `wanted`, `leases`,
`pointer.json`), or as `.` or `..`, has its first byte encoded too. So a listing by `/` finds the runs, and no run can
hide in another.
"""

from __future__ import annotations

from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec

from cachefs.errors import InvalidError
from cachefs.formats.names import to_bytes, to_text

KEY_MAX = 1024
"""Longest S3 key, bytes (S3 user guide, "Creating object key names")."""

_SAFE = "=+,@~"
_RESERVED = frozenset({"attempts", "leases", "loose", "pointer.json", "wanted", ".", ".."})
_SHARD_NAME_MAX = 80


def _component(part: bytes) -> str:
    text = quote_from_bytes(part, safe=_SAFE)
    return f"%{part[0]:02X}{text[1:]}" if text in _RESERVED else text


def _file(member: str) -> str:
    """Return the file name of what a member writes; never `pointer.json`, which access policies know by its name."""
    return _component(f"{member}.json".encode())


def _path(path: bytes) -> str:
    return "/".join(_component(part) for part in path.split(b"/"))


class Keys(msgspec.Struct, frozen=True):
    """Builds keys under one store prefix. `run` arguments are text forms (see names.py), as are paths."""

    prefix: str = ""

    def _join(self, tail: str) -> str:
        key = f"{self.prefix}/{tail}" if self.prefix else tail
        if len(key.encode()) > KEY_MAX:
            raise InvalidError(
                f"object key longer than {KEY_MAX} bytes: {key[:80]}...", hint="use a shorter run directory or prefix"
            )
        return key

    def _in(self, run: str, tail: str) -> str:
        return self._join(f"runs/{_path(to_bytes(run))}/{tail}")

    def run(self, run: str) -> str:
        """Return the prefix of a run, without a trailing slash."""
        return self._join(f"runs/{_path(to_bytes(run))}")

    def runs(self) -> str:
        """Return the prefix that holds every run, with a trailing slash."""
        return self._join("runs/")

    def probe(self, ident: str) -> str:
        """Return the prefix for one store probe, with a trailing slash."""
        return self._join(f".probe/{ident}/")

    def pointer(self, run: str) -> str:
        """Return the key of a run's pointer."""
        return self._in(run, "pointer.json")

    def attempts(self, run: str) -> str:
        """Return the prefix of all attempts of a run, with a trailing slash."""
        return self._in(run, "attempts/")

    def attempt(self, run: str, attempt: str) -> str:
        """Return the prefix of one attempt, without a trailing slash."""
        return self._in(run, f"attempts/{attempt}")

    def open(self, run: str, attempt: str) -> str:
        """Return the key of the attempt's open record."""
        return self._in(run, f"attempts/{attempt}/open.json")

    def close(self, run: str, attempt: str) -> str:
        """Return the key of the attempt's close record."""
        return self._in(run, f"attempts/{attempt}/close.json")

    def member(self, run: str, attempt: str, member: str) -> str:
        """Return the key of a member's report."""
        return self._in(run, f"attempts/{attempt}/members/{_file(member)}")

    def members(self, run: str, attempt: str) -> str:
        """Return the prefix of the members' reports, with a trailing slash."""
        return self._in(run, f"attempts/{attempt}/members/")

    def tests(self, run: str, attempt: str, sealed: int) -> str:
        """Return the prefix of the members' shares of a restore test, with a trailing slash."""
        return self._in(run, f"attempts/{attempt}/tests/{sealed}/")

    def member_test(self, run: str, attempt: str, sealed: int, member: str) -> str:
        """Return the key of one member's share of the restore test of the manifest sealed under epoch `sealed`."""
        return f"{self.tests(run, attempt, sealed)}{_file(member)}"

    def abandoned(self, run: str, attempt: str) -> str:
        """Return the key of the record that says why an attempt ended."""
        return self._in(run, f"attempts/{attempt}/abandoned.json")

    def wanted(self, run: str, attempt: str = "") -> str:
        """Return the key of a member's wish, or without `attempt` the prefix of all, with a trailing slash."""
        return self._in(run, f"wanted/{attempt}.json" if attempt else "wanted/")

    def lease(self, run: str, lease: str = "") -> str:
        """Return the key of a reader's lease, or without `lease` the prefix of all, with a trailing slash."""
        return self._in(run, f"leases/{lease}.json" if lease else "leases/")

    def manifest(self, run: str, attempt: str, *, opened: int, sealed: int) -> str:
        """Return the key of the manifest sealed under epoch `sealed` of an attempt opened under epoch `opened`."""
        name = "manifest.json" if sealed == opened else f"manifest-{sealed}.json"
        return self._in(run, f"attempts/{attempt}/{name}")

    def test(self, run: str, attempt: str, *, opened: int, sealed: int) -> str:
        """Return the key of the restore test's evidence for that manifest."""
        name = "test.json" if sealed == opened else f"test-{sealed}.json"
        return self._in(run, f"attempts/{attempt}/{name}")

    def shard(self, run: str, attempt: str, member: str, shard: str, path: str) -> str:
        """Return a shard's key: unique by the shard id; the file's name is there for human readers only."""
        name = _component(to_bytes(path).rsplit(b"/", 1)[-1])[:_SHARD_NAME_MAX].rstrip("%")
        return self._in(run, f"attempts/{attempt}/shards/{_component(member.encode())}/{shard}-{name}")

    def shards(self, run: str, attempt: str, member: str) -> str:
        """Return the prefix of a member's shards in an attempt, with a trailing slash."""
        return self._in(run, f"attempts/{attempt}/shards/{_component(member.encode())}/")

    def loose(self, run: str, path: str) -> str:
        """Return the key of a loose file; `path` is relative to the run directory."""
        return self._in(run, f"loose/{_path(to_bytes(path))}")

    def name_of(self, key: str) -> str:
        """Return the member, wish or lease that the last component of a `.json` key names."""
        return to_text(unquote_to_bytes(key.rsplit("/", 1)[-1].removesuffix(".json")))

    def run_of(self, key_prefix: str) -> str:
        """Return the run's text form for a prefix `<prefix>/runs/<run>` (the inverse of `run`)."""
        return to_text(unquote_to_bytes(key_prefix.removeprefix(self.runs()).rstrip("/")))
