"""The keys. The fields of `Config` are the one table that all else is made from: names, bounds, units and help of the
TOML keys, of the environment variables and of the flags, and the table in the README.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from cachefs.config.values import GIB, MIB, Location, address, location, with_unit
from cachefs.members import Members, Owner, read_back

ENV_PREFIX: Final = "CACHEFS_"


def _size(text: str, *, ge: int = 0, le: int = 2**63 - 1) -> Meta:
    return Meta(description=text, ge=ge, le=le, extra={"unit": "bytes"})


def _seconds(text: str, *, least: float = 0, **extra: object) -> Meta:
    return Meta(description=text, ge=least, extra={"unit": "seconds", **extra})


def _text(text: str, **extra: object) -> Meta:
    return Meta(description=text, extra=extra)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of one mount. Sizes are bytes, durations seconds, paths absolute (see `load`)."""

    mountpoint: Annotated[Path, _text("directory where training code sees its files", flag="MOUNTPOINT")]
    store: Annotated[str, _text("`file:///absolute/directory` or `s3://bucket/prefix`")]
    staging: Annotated[Path, _text("directory on local NVMe that holds the files and the journal")]
    endpoint_url: Annotated[str | None, _text("S3 endpoint, when it is not Amazon's")] = None
    region: Annotated[str | None, _text("S3 region, when the usual AWS settings do not give it")] = None
    run: Annotated[str, _text("run of the generations that lie directly under the mountpoint")] = "default"
    member: Annotated[str, _text("name of this node in its runs", shown="the host's name")] = msgspec.field(
        default_factory=socket.gethostname
    )
    members: (
        Annotated[
            str,
            _text("who saves together: their number, their names (`a,b`, `gpu[01-04]`), or `auto`", shown="this node"),
        ]
        | None
    ) = None
    owner: Annotated[
        Owner,
        _text(
            "whether this node opens and publishes saves; `auto`: the first member does; `service`: it does, and is no "
            "member"
        ),
    ] = "auto"
    publish: Annotated[bool, _text("flush, seal, test and publish; `false` keeps everything local")] = True
    presets: Annotated[
        tuple[str, ...],
        Meta(
            description="generation presets in use: names with commas between them, in a file also a list", min_length=1
        ),
    ] = ("auto",)
    preset: Annotated[
        tuple[dict[str, Any], ...], _text("your own presets, one `[[preset]]` table each", file_only=True)
    ] = ()
    metrics: Annotated[str, _text("`HOST:PORT` of the Prometheus endpoint, or `off`")] = "127.0.0.1:9464"
    data_path: Annotated[
        Literal["auto", "kernel", "python"],
        _text("who moves the bytes: the `kernel` (passthrough), `python`, or `auto`: the best there is"),
    ] = "auto"
    allow_other: Annotated[bool, _text("let other users reach the mount", shown="`true` for root")] = msgspec.field(
        default_factory=lambda: os.geteuid() == 0
    )
    upload_concurrency: Annotated[int, Meta(description="parts sent at the same time", ge=1, le=256)] = 8
    part_size: Annotated[int, _size("bytes of one part; larger files are sent in parts", ge=5 * MIB, le=5 * GIB)] = (
        64 * MIB
    )
    bandwidth: Annotated[int, _size("bytes per second that the flush may send, `0` for no limit")] = 0
    test_level: Annotated[
        Literal["checksum", "bytes", "load"],
        _text("restore test: compare the store's `checksum`s, read all `bytes` back, or also run `load_command`"),
    ] = "bytes"
    load_command: (
        Annotated[str, _text("for `load`: command that loads the restored copy whose path is its last argument")] | None
    ) = None
    load_timeout: Annotated[float, _seconds("longest run of `load_command`", least=1)] = 600.0
    load_user: Annotated[str, _text("user that runs `load_command`", shown="the daemon's, if not root")] | None = None
    drain_timeout: Annotated[float, _seconds("longest wait for the backlog when stopping")] = 60.0
    close_deadline: Annotated[float, _seconds("longest wait of a closed generation for files still open")] = 600.0
    settle: (
        Annotated[float, _seconds("quiet time after a close signal that other files may follow", shown="the preset's")]
        | None
    ) = None
    quiet: (
        Annotated[
            float, _seconds("quiet time that closes a save whose signal proves little", least=0.1, shown="the preset's")
        ]
        | None
    ) = None
    loose: Annotated[bool, _text("mirror files outside every generation (logs, trackers)")] = True
    loose_interval: Annotated[float, _seconds("time between two mirrors of a changing loose file", least=0.1)] = 30.0
    early_upload_delay: Annotated[float, _seconds("quiet time before a closed file of an open save is uploaded")] = 2.0
    reserve: Annotated[int, _size("free bytes of the staging disk that new files must leave")] = GIB
    full_timeout: Annotated[float, _seconds("longest wait of a create below the reserve, then ENOSPC")] = 60.0
    pointer_poll: Annotated[float, _seconds("time between two looks at pointers and other members", least=0.1)] = 15.0
    member_settle: Annotated[
        float, _seconds("time after which a member without files of a closed save says that it has none")
    ] = 10.0
    member_deadline: Annotated[
        float, _seconds("longest wait for the reports of all members; then the save is abandoned", least=1)
    ] = 3600.0
    probe_interval: Annotated[
        float, _seconds("time between two looks whether the store still honours conditions, `0` for none")
    ] = 900.0
    gc: Annotated[bool, _text("delete generations that nothing keeps, in the runs that this daemon owns")] = False
    gc_interval: Annotated[float, _seconds("time between two passes of garbage collection", least=0.1)] = 3600.0
    gc_grace: Annotated[float, _seconds("time without a write after which an attempt may be deleted")] = 86400.0
    keep_last: Annotated[int, Meta(description="generations kept, the last ones published", ge=0)] = 3
    keep_hourly: Annotated[int, Meta(description="hours of which the newest generation is kept", ge=0)] = 24
    keep_daily: Annotated[int, Meta(description="days of which the newest generation is kept", ge=0)] = 7
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _text("least severity that is logged: debug, info, warning, error"),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "text"], _text("`json` or `text`; `auto` is text for terminals and journald, else JSON")
    ] = "auto"

    @property
    def location(self) -> Location:
        """Return the parsed `store`. Raises InvalidError (never after `load`)."""
        return location(self.store)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Return (host, port) for metrics, None when off. Raises InvalidError (never after `load`)."""
        return address(self.metrics)

    @property
    def membership(self) -> Members:
        """Return who takes part. Raises InvalidError for `auto`, which `load` has replaced."""
        return read_back(self.member, self.members, self.owner)


class Key(msgspec.Struct, frozen=True):
    """One configuration key as people meet it. `flag` and `env` are empty for keys that only a file can hold."""

    name: str
    type: Any
    help: str
    unit: str
    default: str
    required: bool
    flag: str
    env: str

    @property
    def kind(self) -> Any:
        """Return the type without its bounds."""
        return _bare(self.type)

    @property
    def switch(self) -> bool:
        """Return whether the flag takes no value (`--name` / `--no-name`)."""
        return self.kind is bool


def _given(kind: Any) -> Any:
    """Return what a value may be when it is given: the annotated half of `Annotated[...] | None`."""
    return next((half for half in get_args(kind) if get_origin(half) is Annotated), kind)


def _bare(kind: Any) -> Any:
    return kind.__origin__ if get_origin(kind) is Annotated else kind


def _default(value: object, unit: str) -> str:
    if value is None or value == ():
        return ""
    if unit and isinstance(value, int | float):
        return f"`{with_unit(value, unit)}`"
    if isinstance(value, tuple):
        return f"`{', '.join(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _keys() -> dict[str, Key]:
    hints = get_type_hints(Config, include_extras=True)
    keys = {}
    for field in msgspec.structs.fields(Config):
        kind = _given(hints[field.name])
        meta: Meta = kind.__metadata__[0]
        extra = meta.extra or {}
        unit, file_only = extra.get("unit", ""), extra.get("file_only", False)
        dashed = f"--{field.name.replace('_', '-')}"
        switch = f"{dashed} / --no-{dashed[2:]}" if _bare(kind) is bool else dashed
        keys[field.name] = Key(
            name=field.name,
            type=kind,
            help=meta.description or "",
            unit=unit,
            default=extra.get("shown") or ("required" if field.required else _default(field.default, unit)),
            required=field.required,
            flag="" if file_only else extra.get("flag", switch),
            env="" if file_only else ENV_PREFIX + field.name.upper(),
        )
    return keys


KEYS: Final[Mapping[str, Key]] = _keys()
"""Every key by name, in the order of `Config`."""


def table() -> str:
    """Return the markdown table of the README."""
    lines = ["| key | flag | variable | default | meaning |", "|---|---|---|---|---|"]
    for key in KEYS.values():
        flag, env = (f"`{text}`" if text else "" for text in (key.flag, key.env))
        unit = f" ({key.unit})" if key.unit else ""
        lines.append(f"| `{key.name}` | {flag} | {env} | {key.default} | {key.help}{unit} |")
    return "\n".join(lines) + "\n"
