"""The HTTP process: `python -m launcher.frontend_main CONTEXT --fd N`.

`CONTEXT` is the run context's file, `N` an inherited socket that the supervisor has bound, so that a taken port is
known before the model loads.
"""

from __future__ import annotations

import argparse
import socket
import sys

from moeserve.config import ConfigError
from moeserve.frontend.logs import configure_logs
from moeserve.frontend.server import serve
from moeserve.frontend.services import Services
from moeserve.model.spec import ModelError
from moeserve.wire import load_run_context

# The model cannot be served, so another start would fail alike.
EXIT_MODEL = 3


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal; return the exit status."""
    parser = argparse.ArgumentParser(prog="launcher.frontend_main")
    parser.add_argument("context", help="file of the run context")
    parser.add_argument("--fd", type=int, required=True, help="bound listening socket")
    options = parser.parse_args(arguments)
    run = load_run_context(options.context)
    configure_logs(run.config.log_level, run.config.log_format)
    try:
        serve(Services.load(run), socket.socket(fileno=options.fd))
    except ConfigError as error:
        print(f"moeserve: {error}", file=sys.stderr)
        return 2
    except ModelError as error:
        # The supervisor says it to the user.
        run.frontend_failure.write_text(str(error), encoding="utf-8", errors="replace")
        return EXIT_MODEL
    return 0


if __name__ == "__main__":
    sys.exit(main())
