"""The settings of a service: one dataclass that the command line, the environment, a TOML file and the docs all read.

Each field's `help` is what `moeserve serve --help` prints. Precedence: flag, then `MOESERVE_...`, then the TOML file, then
the default here. Sizes are bytes; the command line also takes `512MiB` or `2GB`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one sentence for the user."""


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A field with its help text; `extra` may hold `choices`, `kind="size"` (bytes), `minimum` and `secret`."""
    metadata = {"help": help, **extra}
    if isinstance(default, tuple):
        return field(default=default, metadata={**metadata, "multiple": True})
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything `moeserve serve` can be told."""

    model: str | None = setting(None, "Local directory or hub id; the demo model when left out.")
    served_model_name: tuple[str, ...] = setting((), "Name(s) under which clients ask for the model.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", minimum=0)
    revision: str | None = setting(None, "Branch, tag or commit of the hub model.")
    offline: bool = setting(False, "Use only what is already on disk.")
    device: str = setting("auto", "Where the model runs.", choices=("auto", "cpu"))
    dtype: str = setting(
        "auto",
        "Weights and activations; auto is float32 on a CPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    threads: int = setting(0, "Threads of the model process; 0 takes every core this process may use.", minimum=0)
    max_model_len: int | None = setting(None, "Longest prompt plus output, in tokens.", minimum=1)
    block_size: int = setting(16, "Tokens per KV block.", minimum=1)
    kv_cache_memory: int | None = setting(
        None, "Memory for KV blocks; by default a share of what is free.", kind="size"
    )
    enable_prefix_caching: bool = setting(True, "Keep the KV of computed prefixes for later requests.")
    max_num_seqs: int = setting(64, "Requests that run at once.", minimum=1)
    max_num_batched_tokens: int | None = setting(None, "Tokens per step; 256 on a CPU unless given.", minimum=1)
    max_num_queued_reqs: int = setting(256, "Requests that may wait; one more is refused with 503.", minimum=0)
    scheduling_policy: str = setting(
        "fcfs", "Order of the queue: first come, or longest cached prefix first.", choices=("fcfs", "lpm")
    )
    seed: int = setting(0, "Base of the seeds drawn for requests that bring none.")
    max_logprobs: int = setting(20, "Most alternatives per token a client may ask for.", minimum=0)
    max_request_bytes: int = setting(4 * 2**20, "Largest request body.", kind="size")
    api_key: tuple[str, ...] = setting((), "Key that clients must send (several allowed).", secret=True)
    api_key_file: str | None = setting(
        None, "File of keys, one `role:key` or `key` per line; roles user, metrics, admin."
    )
    shutdown_timeout: float = setting(30.0, "Seconds that running requests get to finish after SIGTERM.", minimum=0)
    engine_timeout: float = setting(
        10.0, "Seconds without progress of a busy engine before it is taken for hung.", minimum=1
    )
    log_level: str = setting("info", "Least severe log line printed.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("auto", "Log lines for people or machines.", choices=("auto", "console", "json"))


def parse_size(text: str | int) -> int:
    """Bytes of `1073741824`, `512MiB`, `2GB`, `4g`. Raises ConfigError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size such as 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])
