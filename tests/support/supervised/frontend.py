"""Stands in for the HTTP process: answers `/ready`, says what it hears of the engine, and takes SIGTERM as
STANDIN_FRONTEND says."""

import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from launcher.child import die_with_parent
from moeserve.wire import decode_news, load_run_context


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def tick(descriptor: int) -> None:
    while True:
        os.write(descriptor, b".")
        time.sleep(0.1)


def hear(descriptor: int) -> None:
    with open(descriptor, "rb", buffering=0) as pipe:
        for line in pipe:
            say(f"frontend hears of engine {decode_news(line).incarnation}")


def say(line: str) -> None:
    """Write a line at once: other processes write to the same pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    manner = os.environ.get("STANDIN_FRONTEND", "")
    if manner == "cannot serve the model":
        load_run_context(sys.argv[1]).frontend_failure.write_text("The tokenizer is none.")
        sys.exit(3)
    listener = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    server = HTTPServer(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    terms = threading.Semaphore(0)
    beats = int(sys.argv[sys.argv.index("--beat-fd") + 1])

    def on_signal(*_: object) -> None:
        say("frontend got a signal")
        terms.release()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    die_with_parent(os.getppid(), signal.SIGINT)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=tick, args=(beats,), daemon=True).start()
    news = int(sys.argv[sys.argv.index("--news-fd") + 1])
    threading.Thread(target=hear, args=(news,), daemon=True).start()
    terms.acquire()
    if manner == "has streams":
        terms.acquire()
    if manner == "ignores signals":
        threading.Event().wait()


main()
