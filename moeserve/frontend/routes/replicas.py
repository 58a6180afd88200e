"""The routes by which routers get to know a replica: what it is, what it holds and does, and a request's tokens.

Paths and fields are the ones that routers for vLLM and SGLang read.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.config import VERSION
from moeserve.frontend.dialects.internal import GenerateRequest
from moeserve.frontend.exchange import thought_budgets
from moeserve.frontend.http import ApiError, json_response, longest_output
from moeserve.frontend.keys import cache_namespace
from moeserve.frontend.prepare.messages import Kind, Prepared, expect
from moeserve.frontend.services import Services
from moeserve.thoughts import ThoughtBudget
from moeserve.wire import EngineReady, Stats

_ANY_HOST = ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")


class ReplicaRoutes:
    """Answers routers that ask for a replica's facts, its load, and where it publishes events about cached blocks."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def kv_event_sources(self, request: Request) -> Response:
        """Answer with the endpoints of each rank. An endpoint on all interfaces is named by the host of the request."""
        ready = self._ready()
        if not ready.kv_event_sources:
            raise ApiError(
                404, "This service publishes no KV events: start it with --kv-events-config", code="no_events"
            )
        host = request.url.hostname or "127.0.0.1"
        sources = {str(rank): _reachable(source, host) for rank, source in enumerate(ready.kv_event_sources)}
        return json_response(sources)

    async def server_info(self, _: Request) -> Response:
        run, ready = self._services.run, self._ready()
        num_ranks = run.config.expert_parallel_size
        return json_response(
            {
                "model_id": run.served_model_names[0],
                "model_path": run.config.model or run.served_model_names[0],
                "served_model_name": run.served_model_names[0],
                # Services that share KV on disk share the secret.
                "instance_id": hashlib.sha256(f"instance {run.secret} {run.run_dir}".encode()).hexdigest()[:32],
                "kv_block_size": ready.block_size,
                "effective_attention_block_size": ready.block_size,
                "worker_type": "regular",
                "version": VERSION,
                "tp_size": 1,
                "dp_size": num_ranks,
                "max_total_num_tokens": ready.num_blocks * ready.block_size,
                "max_running_requests": ready.max_num_seqs,
                "internal_states": [{} for _ in range(num_ranks)],
            }
        )

    async def model_info(self, _: Request) -> Response:
        run, ready = self._services.run, self._ready()
        model = run.config.model or run.served_model_names[0]
        return json_response(
            {
                "model_path": model,
                "tokenizer_path": model,
                "is_generation": True,
                "served_model_name": run.served_model_names[0],
                "max_context_length": ready.max_model_len,
            }
        )

    async def loads(self, _: Request) -> Response:
        """Answer with the load of all ranks together."""
        ready, stats = self._ready(), self._services.stats
        loads = [] if stats is None else [self._load(ready, stats)]
        return json_response({"timestamp": time.time(), "version": VERSION, "dp_rank_count": 1, "loads": loads})

    def _load(self, ready: EngineReady, stats: Stats) -> dict[str, Any]:
        num_total = stats.num_running + stats.num_waiting
        num_tokens = ready.num_blocks * ready.block_size
        tenants = {} if stats.load is None else stats.load.tenants
        latest = self._services.live.latest
        return {
            "dp_rank": 0,
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_waiting_uncached_tokens": sum(backlog.tokens for backlog in tenants.values()),
            "num_total_reqs": num_total,
            "num_used_tokens": stats.blocks_leased * ready.block_size,
            "max_total_num_tokens": num_tokens,
            "token_usage": round(stats.blocks_leased / max(1, ready.num_blocks), 4),
            "gen_throughput": 0.0 if latest is None else latest.generation_rate,
            "cache_hit_rate": 0.0 if latest is None else latest.hit_rate or 0.0,
            "utilization": round(stats.num_running / max(1, ready.max_num_seqs), 4),
            "max_running_requests": ready.max_num_seqs,
        }

    def _ready(self) -> EngineReady:
        """Return the engine's facts. Raises ApiError while there are none."""
        self._services.check_serving()
        ready = self._services.engine.ready
        assert ready is not None
        return ready


def _reachable(source: Mapping[str, Any], host: str) -> dict[str, Any]:
    """Return a source whose endpoints name a host."""

    def reach(endpoint: str | None) -> str | None:
        for any_host in _ANY_HOST:
            if endpoint is not None and endpoint.startswith(any_host):
                shown = f"[{host}]" if ":" in host else host
                return f"tcp://{shown}:{endpoint.removeprefix(any_host)}"
        return endpoint

    return {**source, **{name: reach(source[name]) for name in ("endpoint", "replay_endpoint")}}


class RenderRoute:
    """The ASGI endpoint that answers with the tokens that a request of a dialect has, and generates nothing."""

    def __init__(self, services: Services, kind: Kind) -> None:
        self._services = services
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        facts = services.check_serving()
        prepared = expect(await services.receive(self._kind, scope, receive), Prepared)
        request, identity = prepared.request, scope["state"]["identity"]
        # A router knows a prompt's namespace as the salt that events have.
        salt = cache_namespace(services.run.secret, identity, request.cache_salt) or None
        rendered = []
        budgets = thought_budgets(services, prepared)
        for number, prompt in enumerate(prepared.prompts):
            most = longest_output(len(prompt), facts.max_model_len, request.prompt_field)
            rendered.append(
                {
                    "request_id": f"{scope['state']['request_id']}-{number}"
                    if number
                    else scope["state"]["request_id"],
                    "model": request.model,
                    "token_ids": prompt.tolist(),
                    "features": None,
                    "sampling_params": _sampling(request, most, budgets[number]),
                    "stream": request.stream,
                    "cache_salt": salt,
                    "priority": request.priority,
                }
            )
        await json_response(rendered if self._kind == "completions" else rendered[0])(scope, receive, send)


def _sampling(request: GenerateRequest, most: int, budget: ThoughtBudget | None) -> dict[str, Any]:
    """Return how a request's tokens are sampled. most: the tokens that fit behind its prompt. budget: of its
    thoughts."""
    sampling = request.sampling
    return {
        "n": request.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": request.seed,
        "stop": list(request.stop),
        "max_tokens": request.longest_output(most),
        "min_tokens": sampling.min_tokens,
        "logprobs": sampling.logprobs,
        "thinking_token_budget": None if budget is None else budget.max_tokens,
    }
