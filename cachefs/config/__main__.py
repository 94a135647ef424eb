"""`python -m cachefs.config` prints the README's table of keys; with the arguments KEY and FILE, one key as the file or
the environment sets it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cachefs.config.load import given
from cachefs.config.schema import table
from cachefs.errors import InvalidError


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
