"""`cachefs`: the command line. Errors are one line with a hint, and the exit code of errors.py."""

from __future__ import annotations

import sys

import click
import typer

from cachefs import __version__
from cachefs.cli import ask, bucket, doctor, mount
from cachefs.errors import CachefsError

app = typer.Typer(
    help="A write-back cache file system for training checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("mount")(mount.mount)
app.command("status")(ask.status)
app.command("wait")(ask.wait)
app.command("close")(ask.close)
app.command("flush")(ask.flush)
app.command("ls")(bucket.ls)
app.command("verify")(bucket.verify)
app.command("restore")(bucket.restore)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"cachefs {__version__}")
        raise typer.Exit


def report(error: CachefsError) -> int:
    """Print an error for the user; return its exit code."""
    sys.stderr.write(f"cachefs: {error}\n")
    if error.hint:
        sys.stderr.write(f"         {error.hint}\n")
    return error.exit_code


def main() -> None:
    """Run the command line; the process's exit code is the result."""
    try:
        code = app(standalone_mode=False)
    except CachefsError as error:
        code = report(error)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = 2
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = 130
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
