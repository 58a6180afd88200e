"""The setting `--kv-events-config`: whether and where the service publishes the contents of its prefix caches.

It is the JSON object that vLLM takes under the same name, with two fields of our own, `format` and `connect`. This
module needs the standard library alone.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from moeserve.settings.objects import read_object

_MAX_PORT = 65535
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]*\]|[^:/\[\]]+):(\*|\d{1,5})")
_LOOPBACK = re.compile(r"(127(\.\d{1,3}){3}|localhost|\[::1\])")
_FORMATS = ("map", "array")
# The schema that vllm-router asks of a source that it finds by itself; it passes over others without a word.
_MAP_SCHEMA = {"encoding": "msgpack", "schema_version": 1}


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """How events about cached KV blocks are published.

    endpoint: of rank 0; rank r has the next ports, or a name of its own. replay_endpoint: None for no replay. topic:
    the first frame of each message. buffer_steps: batches that can be replayed. hwm: messages that wait for one
    subscriber. max_queue_size: batches that wait to be encoded. format: of an event, a map or, as before version 0.26
    of vLLM, an array. connect: the publisher connects instead of binding.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "map"
    connect: bool = False

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def is_local(self) -> bool:
        """False if other machines may reach the endpoints: events hold the prompts' tokens."""
        return all(_is_local(endpoint) for endpoint in (self.endpoint, self.replay_endpoint) if endpoint is not None)

    def source(self, endpoint: str, replay_endpoint: str | None) -> dict[str, Any]:
        """Return the description for routers of a rank whose sockets have these addresses."""
        told = asdict(self) | {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
        return told | _MAP_SCHEMA if self.format == "map" else told


def parse_kv_events(text: str | None) -> KvEventsConfig:
    """Return the setting, with defaults for missing fields. Raise ValueError, one clause, for a wrong one."""
    if text is None:
        return KvEventsConfig()
    config = read_object(text, KvEventsConfig)
    _check(config)
    return config


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return a rank's own address: the port (unless it is 0) plus its number, or a name that ends with it."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    port = 0 if tcp[2] == "*" else int(tcp[2])
    return f"tcp://{tcp[1]}:{port + rank if port else '*'}"


def _check(config: KvEventsConfig) -> None:
    """Raise ValueError for values that cannot be used."""
    if config.publisher not in ("zmq", "null", None):
        raise ValueError(f"publisher is {config.publisher!r}, not zmq or null")
    if config.format not in _FORMATS:
        raise ValueError(f"format is {config.format!r}, not map or array")
    for name, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if endpoint is None or re.fullmatch(r"(ipc|inproc)://\S+", endpoint):
            continue
        tcp = _TCP.fullmatch(endpoint)
        if tcp is None or (tcp[2] != "*" and int(tcp[2]) > _MAX_PORT):
            raise ValueError(f"{name} is {endpoint[:80]!r}, not like tcp://127.0.0.1:5557 or ipc:///path")
    is_fixed = endpoint_of(config.endpoint, 0) == config.endpoint and not config.endpoint.endswith(":*")
    if config.endpoint == config.replay_endpoint and is_fixed:
        raise ValueError("endpoint and replay_endpoint are the same")


def _is_local(endpoint: str) -> bool:
    tcp = _TCP.fullmatch(endpoint)
    return tcp is None or _LOOPBACK.fullmatch(tcp[1]) is not None
