"""`cachefs`: the command line. Errors are one line with a hint, and the exit code of errors.py."""

from __future__ import annotations

import sys

import typer

from cachefs import __version__
from cachefs.cli import ask, bucket, doctor, mount, policy, retention
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
app.command("rollback")(retention.rollback)
app.command("gc")(retention.gc)
app.command("doctor")(doctor.doctor)
app.command("policy")(policy.policy)


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
    """Run the command line; ends the process with the command's exit code."""
    try:
        app()  # typer itself reports a wrong command line (2) and an interrupt (130)
    except CachefsError as error:
        sys.exit(report(error))
    except OSError as error:
        sys.exit(report(CachefsError(str(error))))


if __name__ == "__main__":
    main()
