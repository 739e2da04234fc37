"""The `headrace` command: one module per sub-command, each light to import."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. A HeadraceError is one line on standard error and exit code 1."""
    from headrace.cli.app import app
    from headrace.errors import HeadraceError

    try:
        app()
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
