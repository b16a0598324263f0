"""The command line. What it needs is imported in `main`, so that Ctrl-C is quiet from the first moment on."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit. A mistake of the user ends with one line and exit code 2."""
    try:
        from afterglow.cli.commands import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)
