"""Prefill and decode apart: the setting `--kv-transfer-config`, and the ticket with which one service fetches the KV of
a prompt that another one has computed. The standard library alone.

A ticket travels through the fields of `kv_transfer_params` that vLLM's proxies pass on unread. It is signed with the
key that both services have, so that no client makes a service connect to an address of the client's choice.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from array import array
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from math import ceil
from typing import Any

from moeserve.settings.objects import read_object

TRANSPORT = "moeserve-zmq-3"  # the number changes with the messages between services
_DIGEST_BYTES = 16
_MAX_PORT = 65535
_MAX_BLOCKS = 2**31
_MAX_SECONDS = 2**53
_MAX_CHARS = 255
_CLOCKS_DIFFER_S = 300  # by which the clocks of two services' machines may differ


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    """How services fetch KV from each other.

    key_file: of `moeserve curve-key`, the same for all of them. kv_ip, kv_port: where this service is asked for blocks;
    port 0 takes a free one. lease_seconds: how long the blocks of a prompt are held after its answer, or its last
    fetch.
    """

    key_file: str = ""
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    lease_seconds: float = 60.0

    @property
    def is_local(self) -> bool:
        """False if other machines may reach the port."""
        return ipaddress.ip_address(self.kv_ip).is_loopback


def parse_kv_transfer(text: str) -> KvTransferConfig:
    """Return the setting. Raise ValueError, a clause each, for a wrong one."""
    config = read_object(text, KvTransferConfig)
    if not config.key_file:
        raise ValueError("key_file is missing: moeserve curve-key FILE makes one, for all services that share prompts")
    if config.kv_port > _MAX_PORT:
        raise ValueError(f"kv_port is {config.kv_port}, above {_MAX_PORT}")
    try:
        address = ipaddress.IPv4Address(config.kv_ip)
    except ValueError:
        raise ValueError(f"kv_ip is {config.kv_ip[:80]!r}, not an IPv4 address") from None
    if address.is_unspecified:
        raise ValueError(f"kv_ip is {config.kv_ip}: it has to be the address at which the other services connect")
    return config


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The first `num_blocks` blocks of a prompt, as they lie in an engine.

    engine_id: of its life. request_id: of the lease. fingerprint: of all that the bits of blocks depend on but tokens
    (`moeserve.engine.fingerprint`). prompt: a digest of the tokens in the blocks, in hex. use_by:
    seconds since the epoch until which the lease waits for its first fetch. A ticket of another kind of service is
    empty.
    """

    engine_id: str = ""
    request_id: str = ""
    host: str = ""
    port: int = 0
    num_blocks: int = 0
    block_size: int = 0
    fingerprint: str = ""
    prompt: str = ""
    use_by: int = 0
    signature: str = ""

    def params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` that a proxy passes on to the service that decodes."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [list(range(self.num_blocks))],
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": self.num_blocks * self.block_size,
            "transport": TRANSPORT,
            "block_size": self.block_size,
            "fingerprint": self.fingerprint,
            "prompt": self.prompt,
            "use_by": self.use_by,
            "signature": self.signature,
        }


def read_params(params: dict[str, Any]) -> tuple[bool, KvTicket | None]:
    """Return whether a request's blocks are to be held for another service, and the ticket for its own blocks.

    Raise ValueError, a sentence, if it asks for both.
    """
    offers, fetches = (params.get(name) is True for name in ("do_remote_decode", "do_remote_prefill"))
    if offers and fetches:
        raise ValueError("`do_remote_decode` and `do_remote_prefill` of `kv_transfer_params` cannot both be true")
    return offers, _ticket(params) if fetches else None


def _ticket(params: dict[str, Any]) -> KvTicket:
    def text(name: str) -> str:
        value = params.get(name)
        return value[:_MAX_CHARS] if isinstance(value, str) else ""

    def number(name: str, most: int) -> int:
        value = params.get(name)
        return value if isinstance(value, int) and 0 <= value <= most else 0

    if params.get("transport") != TRANSPORT:
        return KvTicket()
    size = number("block_size", _MAX_BLOCKS)
    return KvTicket(
        engine_id=text("remote_engine_id"),
        request_id=text("remote_request_id"),
        host=text("remote_host"),
        port=number("remote_port", _MAX_PORT),
        num_blocks=number("remote_num_tokens", _MAX_BLOCKS) // max(1, size),
        block_size=size,
        fingerprint=text("fingerprint"),
        prompt=text("prompt"),
        use_by=number("use_by", _MAX_SECONDS),
        signature=text("signature"),
    )


class TicketOffice:
    """Issues tickets for the blocks of this engine, and checks the tickets of others."""

    def __init__(
        self,
        secret: bytes,
        fingerprint: str,
        block_size: int,
        host: str,
        port: int,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """secret: the services' common key. host, port: where this engine is asked for blocks. lease_s: the seconds for
        which blocks are held. clock: returns the seconds since the epoch."""
        self.lease_s = lease_s
        self._clock = clock
        self._secret = secret
        self._blank = KvTicket(
            engine_id=secrets.token_hex(8), host=host, port=port, block_size=block_size, fingerprint=fingerprint
        )

    def issue(self, tokens: array[int], num_blocks: int) -> KvTicket:
        """Return a new ticket for the first blocks of a prompt."""
        ticket = replace(
            self._blank,
            request_id=secrets.token_hex(16),
            num_blocks=num_blocks,
            prompt=self._digest(tokens, num_blocks),
            use_by=ceil(min(self._clock() + self.lease_s, _MAX_SECONDS)),
        )
        return replace(ticket, signature=self._sign(ticket))

    def why_unusable(self, ticket: KvTicket, tokens: array[int]) -> str | None:
        """Return in a word why a ticket does not serve a prompt here, None if it does."""
        if not hmac.compare_digest(self._sign(ticket).encode(), ticket.signature.encode()):
            return "foreign"
        if (ticket.fingerprint, ticket.block_size) != (self._blank.fingerprint, self._blank.block_size):
            return "fingerprint"
        if self._clock() > ticket.use_by + _CLOCKS_DIFFER_S:
            return "old"
        if self._digest(tokens, ticket.num_blocks) != ticket.prompt:
            return "prompt"
        return None

    def _digest(self, tokens: array[int], num_blocks: int) -> str:
        data = tokens[: num_blocks * self._blank.block_size].tobytes()
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()

    def _sign(self, ticket: KvTicket) -> str:
        text = repr(astuple(replace(ticket, signature="")))
        return hmac.digest(self._secret, text.encode(), "sha256").hex()
