"""From what was given to a `Config`: first each value by itself, then what is required and what must fit together."""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from cachefs.config.schema import ENV_PREFIX, KEYS, Config, Key
from cachefs.config.values import absolute, address, check_bounds, check_endpoint, check_run, location, quantity
from cachefs.errors import InvalidError
from cachefs.members import canonical, check_members, check_name, resolve

_CHECKS: Final[Mapping[str, Any]] = {
    "store": location,
    "metrics": address,
    "endpoint_url": check_endpoint,
    "run": check_run,
    "member": check_name,
    "members": check_members,
}


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


def _shown(raw: object) -> str:
    """Return a value for a message: short, and without a password that someone put into a URL."""
    text = re.sub(r"//[^/]*@", "//***@", str(raw))
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return repr(text) if isinstance(raw, str | Path) else text


def _checked(key: Key, raw: object, base: Path) -> Any:
    kind = key.kind
    if isinstance(raw, str | Path) and kind is Path:
        return absolute(raw, base)
    if isinstance(raw, str) and key.unit:
        raw = quantity(raw, key.unit)
    elif isinstance(raw, int) and not isinstance(raw, bool) and key.name == "members":
        raw = str(raw)
    elif isinstance(raw, str) and key.name == "presets":
        raw = [name.strip() for name in raw.split(",") if name.strip()]
    if get_origin(kind) is Literal and raw not in get_args(kind):
        raise InvalidError(f"must be one of {', '.join(get_args(kind))}")
    if key.unit and isinstance(raw, int | float) and not isinstance(raw, bool):
        check_bounds(raw, key.unit, key.type.__metadata__[0])
    value = msgspec.convert(raw, key.type, strict=not isinstance(raw, str))
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidError("must be a finite number")
    if key.name in _CHECKS:
        _CHECKS[key.name](value)
    return value


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
