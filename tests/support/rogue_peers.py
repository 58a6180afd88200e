"""Peers that a fetch of KV should never meet: holders of the key that answer nonsense, and strangers at the port."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from moeserve.engine.curve import load_keys
from moeserve.engine.kv.transfer.messages import GET
from moeserve.kv_transfer import TicketOffice

Message = list[bytes]


class HoldsKey:
    """A service that holds the key and sends `messages` to whoever asks for blocks."""

    def __init__(self, key: Path, messages: Callable[[bytes], list[Message]]) -> None:
        """messages: by the ticket's number."""
        keys = load_keys(key, "")
        self._messages = messages
        self._stopped = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _run(self) -> None:
        askers: set[bytes] = set()
        while not self._stopped.is_set():
            if self._socket.poll(50):
                asker, _, kind, *rest = self._socket.recv_multipart()
                if kind == GET and asker not in askers:
                    askers.add(asker)
                    self._send(asker, *self._messages(rest[0]))

    def _send(self, asker: bytes, *messages: Message) -> None:
        with suppress(zmq.ZMQError):
            for message in messages:
                self._socket.send_multipart([asker, b"", *message])


class Stranger:
    """Listens at a port: it sends some bytes to each client, then nothing more, or closes the connection."""

    def __init__(self, said: bytes, *, closes: bool = False) -> None:
        self._said, self._closes = said, closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        # A close alone does not wake the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with suppress(OSError):
                    connection.sendall(self._said)
                if self._closes:
                    connection.close()
                else:
                    self._connections.append(connection)


class Forger:
    """Issues tickets that are signed with the key of a pair, for prompts that nobody has computed."""

    def __init__(self, key: Path, true: dict[str, Any]) -> None:
        """true: the parameters of a ticket of the pair's."""
        self._secret, self._true = load_keys(key, "").secret, true

    def ticket(self, prompt: list[int], port: int, host: str = "127.0.0.1") -> dict[str, Any]:
        size = self._true["block_size"]
        office = TicketOffice(self._secret, self._true["fingerprint"], size, host, port, lease_s=60.0)
        return office.issue(array("i", prompt), (len(prompt) - 1) // size).params()


@contextmanager
def connections(port: int, count: int, said: bytes) -> Iterator[None]:
    """Hold connections to a port, over each of which some bytes were sent."""
    held = []
    try:
        for _ in range(count):
            held.append(socket.create_connection(("127.0.0.1", port)))
            held[-1].sendall(said)
        yield
    finally:
        for connection in held:
            connection.close()
