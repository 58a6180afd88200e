"""Gateways that go by prompts and sessions, and not by events of replicas: `make test-routers`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.clients.environments import Client
from tests.support.routers import address, cached, free_port, program, start, transfer_settings
from tests.support.service import Service, service, wait_until

SMG = Client("smg", "smg", "pip", ("smg==1.13.0",), "")
# The packages of its extra `proxy` that its import asks for; the extra itself pins one that not every index has.
LITELLM = Client(
    "litellm-proxy",
    "litellm's proxy",
    "pip",
    (
        "litellm==1.109.1",
        *("fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "backoff==2.2.1", "pyyaml==6.0.4"),
        *("orjson==3.13.0", "apscheduler==3.11.3", "fastapi-sso==0.23.0", "pyjwt==2.15.1"),
        *("python-multipart==0.0.34", "cryptography==50.0.2", "pynacl==1.6.2", "websockets==15.0.1", "rich==15.0.0"),
        *("tomlkit==0.15.2", "restrictedpython==9.0", "expression==5.8.0", "httpx2==2.16.2", "backports-zstd==1.8.0"),
        *("rq==3.0.0", "mcp==2.3.0", "soundfile==0.14.0", "boto3==1.44.8", "gunicorn==27.0.1", "hiredis==3.5.0"),
        *("inquirerpy==0.3.4", "polars==2.1.0", "pyroscope-io==1.4.0", "azure-identity==1.27.0"),
    ),
    "",
)
# They install packages, so only `make test-routers` runs them.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

MASTER_KEY = "sk-of-these-tests-alone-0123456789"
NUM_TALKS = 16


@contextmanager
def smg(folder: Path, *both: Service) -> Iterator[httpx2.Client]:
    flags = ("--policy", "cache_aware", "--health-check-interval-secs", "1", "--prometheus-port", str(free_port()))
    command = ("smg", "launch", "--host", "127.0.0.1", "--port", "{port}", *flags, "--worker-urls")
    with program(SMG, folder, *command, *map(address, both), path="/health") as http:
        wait_until(lambda: http.get("/workers").json()["total"] == len(both))
        yield http


@contextmanager
def litellm(folder: Path, *both: Service) -> Iterator[httpx2.Client]:
    of_one = [{"model": "hosted_vllm/m", "api_base": f"{address(one)}/v1", "api_key": "none"} for one in both]
    config = {
        "model_list": [{"model_name": "m", "litellm_params": each} for each in of_one],
        "router_settings": {"optional_pre_call_checks": ["session_affinity"], "num_retries": 3, "allowed_fails": 0},
        "general_settings": {"master_key": MASTER_KEY},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    command = ("litellm", "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", "{port}")
    # It asks the network for prices otherwise, three times.
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with program(LITELLM, folder, *command, path="/health/liveliness", variables=variables) as http:
        http.headers["authorization"] = f"Bearer {MASTER_KEY}"
        yield http


def say(http: httpx2.Client, number: int, more: str = "", **fields: Any) -> httpx2.Response:
    """Send a turn of one of the conversations, which begin differently."""
    messages = [{"role": "user", "content": f"{number} tell me of whales, " * 8 + more}]
    body = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    answer = http.post("/v1/chat/completions", json=body, headers={"x-litellm-session-id": f"talk {number}"})
    assert answer.status_code == 200, answer.text
    return answer


def text_of(stream: str) -> str:
    """Return the text of a whole stream."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = (choice for event in events[:-1] for choice in json.loads(event)["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def num_prefixes(running: Service) -> int:
    return len(running.http.get("/v1/cache").json()["prefixes"])


@pytest.mark.parametrize("gateway", [smg, litellm])
def test_conversations_stay_with_their_replica_and_go_on_elsewhere_when_it_dies(
    gateway: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        service(model, tmp_path / "a") as one,
        service(model, tmp_path / "b") as other,
        gateway(tmp_path, one, other) as http,
    ):
        for number in range(NUM_TALKS):
            say(http, number)
        # All of the first turn but its last block, which the template ends anew.
        found = [cached(say(http, number, "and more").json()) for number in range(NUM_TALKS)]
        assert min(found) >= 160
        assert num_prefixes(one) > 0 < num_prefixes(other)
        streamed = text_of(say(http, 3, "and more", stream=True).text)
        assert streamed == say(http, 3, "and more").json()["choices"][0]["message"]["content"]
        one.process.kill()
        one.process.wait()
        for number in range(NUM_TALKS):
            say(http, number, "and more")
        found = [cached(say(http, number, "and yet more").json()) for number in range(NUM_TALKS)]
        assert min(found) >= 160


def test_smg_has_one_service_compute_prompts_for_another(model: Path, tmp_path: Path) -> None:
    settings = transfer_settings(tmp_path)
    with ExitStack() as stack:
        prefills, decodes = (start(stack, model, tmp_path / name, *settings) for name in ("p", "d"))
        flags = ("--pd-disaggregation", "--prometheus-port", str(free_port()))
        command = ("smg", "launch", "--host", "127.0.0.1", "--port", "{port}", *flags)
        http = stack.enter_context(program(SMG, tmp_path, *command, path="/liveness"))
        for kind, one in (("prefill", prefills), ("decode", decodes)):
            # Workers of its command line have no connector: it passes on no `kv_transfer_params` for them.
            worker = {"url": address(one), "worker_type": kind, "kv_connector": "NixlConnector"}
            assert http.post("/workers", json=worker).status_code == 202
        wait_until(lambda: [worker["status"] for worker in http.get("/workers").json()["workers"]] == ["ready"] * 2)
        for number in range(4):
            answer = say(http, number, logprobs=True).json()
            assert cached(answer) >= 160
            alone = say(prefills.http, number, logprobs=True, cache_salt="alone").json()
            assert bits(answer) == bits(alone)
        assert text_of(say(http, 4, stream=True).text) == text_of(say(prefills.http, 4, stream=True).text)


def bits(answer: dict[str, Any]) -> array[float]:
    """Return the log probabilities of a chat in 32 bits."""
    return array("f", [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]])
