"""Stands in for an HTTP process: ticks, tells what it hears of the engine and of SIGHUP, ends as its manner says."""

import os
import signal
import sys
import threading
import time

from launcher.child import die_with_parent
from moeserve.run_context import load_run_context
from moeserve.wire import Tick, decode_news


def tick(descriptor: int, heard: threading.Event) -> None:
    while True:
        os.write(descriptor, bytes([Tick.READY if heard.is_set() else Tick(0)]))
        time.sleep(0.1)


def hear(descriptor: int, heard: threading.Event) -> None:
    with open(descriptor, "rb", buffering=0) as pipe:
        for line in pipe:
            say(f"frontend hears of engine {decode_news(line).incarnation}")
            if os.environ.get("STANDIN_FRONTEND") != "is never ready":
                heard.set()


def say(line: str) -> None:
    """Write a line at once: other processes write to the same pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    manner = os.environ.get("STANDIN_FRONTEND", "")
    if manner == "cannot serve the model":
        load_run_context(sys.argv[1]).frontend_failure.write_text("The tokenizer is none.")
        sys.exit(3)
    heard = threading.Event()
    beats = int(sys.argv[sys.argv.index("--beat-fd") + 1])
    # Taken by `sigwait`: a signal that comes just before this thread waits would find nobody in a lock's queue to wake.
    asked = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    die_with_parent(os.getppid(), signal.SIGINT)
    threading.Thread(target=tick, args=(beats, heard), daemon=True).start()
    news = int(sys.argv[sys.argv.index("--news-fd") + 1])
    threading.Thread(target=hear, args=(news, heard), daemon=True).start()
    num_signals = {"has streams": 2, "ignores signals": -1}.get(manner, 1)
    while num_signals:
        if signal.sigwait(asked) == signal.SIGHUP:
            say("frontend reads its files")
            continue
        say("frontend got a signal")
        num_signals -= 1


main()
