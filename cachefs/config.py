"""The configuration: one TOML file, `CACHEFS_<KEY>` variables and flags, in that rising order of precedence.

The fields of `Config` are the one table that everything else is made from: names, bounds, units and help of the TOML
keys, of the environment variables and of the flags, and the table in the README (`python -m cachefs.config` prints it).

    file, environment, flags ─► given(): each value by itself ─► load(): what is required, what fits together ─► Config
"""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from cachefs.errors import CorruptError, InvalidError
from cachefs.formats.names import checked_path
from cachefs.members import Members, Owner, canonical, check_members, check_name, read_back, resolve

MIB: Final = 1024**2
GIB: Final = 1024**3
ENV_PREFIX: Final = "CACHEFS_"

_BYTES: Final = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for tail, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SECONDS: Final = {"ms": 0.001, "": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {"bytes": _BYTES, "seconds": _SECONDS}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def _size(text: str, *, ge: int = 0, le: int = 2**63 - 1) -> Meta:
    return Meta(description=text, ge=ge, le=le, extra={"unit": "bytes"})


def _seconds(text: str, *, least: float = 0, **extra: object) -> Meta:
    return Meta(description=text, ge=least, extra={"unit": "seconds", **extra})


def _text(text: str, **extra: object) -> Meta:
    return Meta(description=text, extra=extra)


class Location(msgspec.Struct, frozen=True):
    """Where the store is. `path` for a directory store; `bucket` and `prefix` (no slashes around it) for S3."""

    scheme: Literal["file", "s3"]
    path: Path | None = None
    bucket: str = ""
    prefix: str = ""


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
    owner: Annotated[Owner, _text("whether this node opens and publishes saves; `auto`: the first member does")] = (
        "auto"
    )
    publish: Annotated[bool, _text("flush, seal, test and publish; `false` keeps everything local")] = True
    presets: Annotated[tuple[str, ...], Meta(description="names of the generation presets in use", min_length=1)] = (
        "auto",
    )
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
        return _address(self.metrics)

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
    def switch(self) -> bool:
        """Return whether the flag takes no value (`--name` / `--no-name`)."""
        return _bare(self.type) is bool


def _given(kind: Any) -> Any:
    """Return what a value may be when it is given: the annotated half of `Annotated[...] | None`."""
    return next((half for half in get_args(kind) if get_origin(half) is Annotated), kind)


def _bare(kind: Any) -> Any:
    return kind.__origin__ if get_origin(kind) is Annotated else kind


def _default(value: object, unit: str) -> str:
    if value is None or value == ():
        return ""
    if unit == "bytes" and isinstance(value, int):
        return f"`{value // GIB}GiB`" if value % GIB == 0 else f"`{value // MIB}MiB`"
    if unit == "seconds":
        return f"`{value:g}s`"
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


def load(file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """Return the complete configuration: flags over environment over file over defaults.

    A flag that is None and an environment variable that is empty count as not given. `member`, `members` and `owner`
    are what the launcher's variables in `env` made of them, so the result does not depend on an environment. Raises
    InvalidError, in one line that names the key, the value and where it came from.
    """
    values = given(file, env, flags)
    for key in KEYS.values():
        if key.required and key.name not in values:
            raise InvalidError(
                f"{key.name} is not set", hint=f"set {key.flag}, {key.env}, or `{key.name}` in the configuration file"
            )
    config = Config(**values)
    _check_directories(config)
    found = resolve(values.get("member"), config.members, config.owner, env, socket.gethostname())
    member, members, owner = canonical(found)
    return msgspec.structs.replace(config, member=member, members=members, owner=owner)


def given(file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> dict[str, Any]:
    """Return only the keys that were given somewhere, each checked on its own and converted.

    For commands that need a part of the configuration (a restore needs a store, but no mount). Relative paths in a file
    are relative to the file's directory, others to the current directory. Raises InvalidError.
    """
    values: dict[str, Any] = {}
    for name, raw in (_read(file) if file else {}).items():
        values[name] = _value(_known(name, f"in {file}"), raw, str(file), file.parent if file else Path())
    for variable, raw in env.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX) and raw and _variable(name, variable):
            values[name] = _value(KEYS[name], raw, variable, Path())
    for name, raw in flags.items():
        if raw is not None:
            key = _known(name, "among the flags")
            values[name] = _value(key, raw, key.flag.split(" ")[0], Path())
    return values


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise InvalidError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidError(f"{file} is not valid TOML: {error}") from error


def _known(name: str, where: str) -> Key:
    if name in KEYS:
        return KEYS[name]
    close = f"; did you mean {_close(name)!r}?" if _close(name) else ""
    raise InvalidError(f"unknown key {name!r} {where}{close}", hint="the README lists every key")


def _variable(name: str, variable: str) -> bool:
    """Return whether the variable is a key. One that is nearly a key is refused; others belong to someone else.

    (A Kubernetes service called "cachefs" puts CACHEFS_PORT and the like into every container.)
    """
    if name in KEYS and not KEYS[name].env:
        raise InvalidError(f"{variable}: {name!r} can be set in the configuration file only")
    if name not in KEYS and (close := _close(name)):
        raise InvalidError(f"unknown variable {variable}; did you mean {ENV_PREFIX}{close.upper()}?")
    return name in KEYS


def _close(name: str) -> str:
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), KEYS, n=1, cutoff=0.75)), "")


def _value(key: Key, raw: object, source: str, base: Path) -> Any:
    try:
        return _checked(key, raw, base)
    except (msgspec.ValidationError, InvalidError) as error:
        problem = f"{str(error)[:1].lower()}{str(error)[1:]}"
        raise InvalidError(f"{key.name} = {_shown(raw)} (from {source}): {problem}") from error


def _checked(key: Key, raw: object, base: Path) -> Any:
    kind = _bare(key.type)
    if isinstance(raw, str | Path) and kind is Path:
        return _absolute(raw, base)
    if isinstance(raw, str) and key.unit:
        raw = _quantity(raw, key.unit)
    elif isinstance(raw, int) and not isinstance(raw, bool) and key.name == "members":
        raw = str(raw)
    elif isinstance(raw, str) and key.name == "presets":
        raw = [name.strip() for name in raw.split(",") if name.strip()]
    if get_origin(kind) is Literal and raw not in get_args(kind):
        raise InvalidError(f"must be one of {', '.join(get_args(kind))}")
    value = msgspec.convert(raw, key.type, strict=not isinstance(raw, str))
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidError("must be a finite number")
    if key.name in _CHECKS:
        _CHECKS[key.name](value)
    return value


def _absolute(raw: str | Path, base: Path) -> Path:
    text = os.path.expanduser(raw)
    if not text.strip() or "\0" in text:
        raise InvalidError("must name a directory")
    return Path(os.path.abspath(base / text))


def _quantity(text: str, unit: str) -> float:
    match = _QUANTITY.fullmatch(text)
    scale = _UNITS[unit].get(match[2].lower()) if match else None
    if match is None or scale is None:
        example = '"64MiB"' if unit == "bytes" else '"90s", "10m" or "2h"'
        raise InvalidError(f"must be a number of {unit}, or text like {example}")
    amount = float(match[1]) * scale
    return round(amount) if unit == "bytes" else amount


def _shown(raw: object) -> str:
    """Return a value for a message: short, and without a password that someone put into a URL."""
    text = re.sub(r"//[^/]*@", "//***@", str(raw))
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return repr(text) if isinstance(raw, str | Path) else text


def location(store: str) -> Location:
    """Return where a store URL points. Raises InvalidError."""
    scheme, separator, rest = store.partition("://")
    if scheme == "file" and separator:
        # Taken literally, not percent-decoded: people write file://$PWD/store.
        if not rest.startswith("/") or "\0" in rest:
            raise InvalidError("a directory store is file:// and an absolute path, like file:///data/checkpoints")
        return Location(scheme="file", path=Path(os.path.abspath(rest)))
    if scheme == "s3" and separator:
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", bucket):
            raise InvalidError("an S3 store is s3://bucket/prefix; credentials come from the usual AWS settings")
        if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
            raise InvalidError("the prefix must not hold empty, '.' or '..' components")
        return Location(scheme="s3", bucket=bucket, prefix=prefix)
    raise InvalidError("must be file:///absolute/directory or s3://bucket/prefix")


def _address(metrics: str) -> tuple[str, int] | None:
    if metrics == "off":
        return None
    host, separator, port = metrics.rpartition(":")
    if not separator or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise InvalidError("must be HOST:PORT (port 0 to 65535) or off")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_endpoint(url: str) -> None:
    if not re.fullmatch(r"https?://[^/@\s?#]+/?", url):
        raise InvalidError("must be http://HOST[:PORT] or https://HOST[:PORT], without credentials or a path")


def _check_run(run: str) -> None:
    try:
        checked_path(run)
    except CorruptError as error:
        raise InvalidError("must be a relative directory path without '.' and '..'") from error


_CHECKS: Final[Mapping[str, Any]] = {
    "store": location,
    "metrics": _address,
    "endpoint_url": _check_endpoint,
    "run": _check_run,
    "member": check_name,
    "members": check_members,
}


def _check_directories(config: Config) -> None:
    """Refuse directories that lie in one another: the daemon would serve, upload or evict its own data."""
    places = {"mountpoint": config.mountpoint, "staging": config.staging}
    if store := config.location.path:
        places["store"] = store
    # First as written; only then through symbolic links, since a look below a mount whose daemon died may block.
    _check_disjoint(places)
    _check_disjoint({name: Path(os.path.realpath(path.parent), path.name) for name, path in places.items()})


def _check_disjoint(places: Mapping[str, Path]) -> None:
    for outer, outside in places.items():
        for inner, inside in places.items():
            if inner != outer and inside.is_relative_to(outside):
                relation = "is the same directory as" if inside == outside else "lies inside"
                raise InvalidError(
                    f"{inner} {inside} {relation} {outer} {outside}",
                    hint="mountpoint, staging and a file store must be three separate directories",
                )


def table() -> str:
    """Return the markdown table of the README."""
    lines = ["| key | flag | variable | default | meaning |", "|---|---|---|---|---|"]
    for key in KEYS.values():
        flag, env = (f"`{text}`" if text else "" for text in (key.flag, key.env))
        unit = f" ({key.unit})" if key.unit else ""
        lines.append(f"| `{key.name}` | {flag} | {env} | {key.default} | {key.help}{unit} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the table, or with the arguments KEY and FILE one key as the file or the environment sets it."""
    if not arguments:
        sys.stdout.write(table())
        return 0
    try:
        sys.stdout.write(f"{given(Path(arguments[1]), os.environ, {})[arguments[0]]}\n")
        return 0
    except InvalidError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
