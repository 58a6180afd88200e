"""A server of few words on a free port, for commands that ask one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    """`answer` writes a whole response, unless its client has left; nothing is logged."""

    def answer(self, status: int, content: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def local_server(handler: type[Handler]) -> Iterator[str]:
    """The server's `HOST:PORT`."""
    server = HTTPServer(("127.0.0.1", 0), handler)
    # It looks for its end that often.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
