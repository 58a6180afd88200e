"""Two services that compute prompts for each other, and what a proxy between them does.

The proxy is the test: it sends what vLLM's toy proxy sends, and passes on what it gets unread.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve.engine.curve import create_keys
from tests.support.service import Service, service, settle, wait_until

ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Pair:
    """A service that computes prompts and one that decodes. folder: has their key."""

    prefills: Service
    decodes: Service
    folder: Path

    @property
    def settings(self) -> tuple[str, ...]:
        return config_of(self.folder)


def config_of(folder: Path, **fields: Any) -> tuple[str, str]:
    key = folder / "kv.key"
    if not key.exists():
        create_keys(key)
    return "--kv-transfer-config", json.dumps({"key_file": str(key), **fields})


def config_of_key(key: Path) -> tuple[str, str]:
    return "--kv-transfer-config", f'{{"key_file": "{key}"}}'


def start(stack: ExitStack, model: Path, folder: Path, *settings: str) -> Service:
    folder.mkdir()
    return stack.enter_context(service(model, folder, *settings))


def start_pair(stack: ExitStack, model: Path, folder: Path, *settings: str) -> Pair:
    """Start both with the same settings."""
    both = (*config_of(folder), *settings)
    prefills, decodes = (start(stack, model, folder / name, *both) for name in ("p", "d"))
    return Pair(prefills, decodes, folder)


def completion(prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    return body | fields


def post(running: Service, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer = running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prefill(running: Service, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """Have a prompt computed as vLLM's toy proxy does; return the parameters for the other service."""
    asked = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    asked |= {"kv_transfer_params": ASKS, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
        del asked["max_tokens"]
    params: dict[str, Any] = post(running, asked, path)["kv_transfer_params"]
    settle(running)
    return params


def bits(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def failures(running: Service, reason: str) -> float:
    return running.figure(f'moeserve_kv_transfer_failed_total{{reason="{reason}"}}')


def wait_for_failures(running: Service, reason: str, count: float) -> None:
    wait_until(lambda: failures(running, reason) == count)


def clear(*services: Service) -> None:
    for running in services:
        assert running.http.delete("/v1/cache").status_code == 200
    settle(*services)


def alone(running: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of one service that has nothing cached."""
    clear(running)
    answer = post(running, body)
    clear(running)
    return answer
