"""Command line options made from the configuration's one table (config.schema.KEYS)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from cachefs.config.load import given, load
from cachefs.config.schema import KEYS, Key

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with the settings of the mount", show_default=False)
]
STORE_KEYS = ("store", "endpoint_url", "region")


def _parameter(key: Key) -> inspect.Parameter:
    text = key.help.replace("`", "") + (f" [default: {key.default.replace('`', '')}]" if key.default else "")
    if key.flag == "MOUNTPOINT":
        kind: Any = Annotated[str | None, typer.Argument(help=text, show_default=False)]
        return inspect.Parameter(key.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
    flag = key.flag.replace(" / ", "/")
    option = typer.Option(flag, help=text, show_default=False)
    kind = Annotated[(bool if key.switch else str) | None, option]
    return inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def with_config(names: Iterable[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of the named keys (default: all) to a command, which takes them as `flags`."""
    keys = [KEYS[name] for name in names] if names is not None else [key for key in KEYS.values() if key.flag]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
        ours = [_parameter(key) for key in keys]
        names = {parameter.name for parameter in ours}

        def call(**values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            command(**values, flags=flags)

        parameters = sorted([*ours, *own], key=lambda p: p.kind is inspect.Parameter.KEYWORD_ONLY)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__doc__ = command.__doc__
        call.__name__ = command.__name__
        return call

    return decorate


def settings(config: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that were given anywhere, for commands that need only some. Raises InvalidError."""
    return given(config, os.environ, flags)


def complete(config: Path | None, flags: dict[str, Any]) -> Any:
    """Return the whole configuration. Raises InvalidError."""
    return load(config, os.environ, flags)
