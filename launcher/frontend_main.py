"""An HTTP process: `python -m launcher.frontend_main CONTEXT --fd N --number I --beat-fd M --news-fd L --wills-fd K`.

`CONTEXT` is the run context's file, `N` an inherited socket that the supervisor has bound, so that a taken port is
known before the model loads. `I` counts the HTTP processes of the service from 0. `M` is a pipe on which the event loop
ticks, so that the supervisor sees it hang. On pipe `L` the supervisor announces the engine's next lives. It takes last
wills on socket `K` (`moeserve.frontend.wills`).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from launcher.child import collect_seldom, die_with_parent
from launcher.logs import configure_logs
from moeserve.config import ConfigError
from moeserve.frontend.prepare.text_messages import bound_pools
from moeserve.frontend.server import serve
from moeserve.frontend.services import Services
from moeserve.model.spec import ModelError
from moeserve.run_context import load_run_context

# The model cannot be served, so another start would fail alike.
EXIT_MODEL = 3


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal; return the exit status."""
    parser = argparse.ArgumentParser(prog="launcher.frontend_main")
    parser.add_argument("context", help="file of the run context")
    parser.add_argument("--fd", type=int, required=True, help="bound listening socket")
    parser.add_argument("--number", type=int, default=0, help="number among the HTTP processes, from 0")
    parser.add_argument("--beat-fd", type=int, help="pipe for the event loop's ticks")
    parser.add_argument("--news-fd", type=int, help="pipe for news of the engine's lives")
    parser.add_argument("--wills-fd", type=int, help="socket for last wills")
    options = parser.parse_args(arguments)
    # When the supervisor is killed, clients get an error event, as on an interrupt. The janitor ends the process.
    die_with_parent(os.getppid(), signal.SIGINT)
    run = load_run_context(options.context)
    several = run.config.num_frontends > 1
    logs = configure_logs(
        run.config.log_level, run.config.log_format, {"frontend": options.number} if several else None
    )
    try:
        services = Services.load(run, lambda: logs.num_dropped, options.news_fd, options.number, logs.drain)
        settle()
        serve(services, socket.socket(fileno=options.fd), options.beat_fd, options.wills_fd)
    except ConfigError as error:
        print(f"moeserve: {error}", file=sys.stderr)
        return 2
    except ModelError as error:
        # The supervisor says it to the user.
        run.frontend_failure.write_text(str(error), encoding="utf-8", errors="replace")
        return EXIT_MODEL
    finally:
        logs.drain()
    return 0


def settle() -> None:
    """Let collecting garbage hold up the event loop less, and have big bodies give their memory back."""
    collect_seldom()
    bound_pools()


def leave(status: int) -> NoReturn:
    """End this process at once, with threads that still compute: nobody waits for it any more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
