"""The routes beside generation: models, health, metrics, live figures, tokens, sleep, and an operator's commands.

By some of them routers get to know a replica: what it is, what it holds and does, and a request's tokens. Their paths
and fields are the ones that routers for vLLM and SGLang read.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.config import VERSION, ServeConfig
from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies
from moeserve.frontend.dialects.bodies import bounded
from moeserve.frontend.dialects.fields import EFFORT
from moeserve.frontend.dialects.internal import GenerateRequest
from moeserve.frontend.errors import ApiError, conflict, invalid, longest_output, unavailable, unknown_model
from moeserve.frontend.exchange import thought_budgets
from moeserve.frontend.http import KEEP_ALIVE, EventStream, json_response, receive_body, until_disconnect
from moeserve.frontend.keys import cache_namespace, caller_of
from moeserve.frontend.metrics import CONTENT_TYPE, VllmNames
from moeserve.frontend.prepare.text_messages import Body, Kind, Prepared, expect
from moeserve.frontend.relay.request_group import EngineGone
from moeserve.frontend.routes.usage import usage_metrics
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.usage import UsageBook
from moeserve.model.demo import SENTENCE, demo_named
from moeserve.settings.generation import parse_effort_budgets
from moeserve.thoughts import ThoughtBudget
from moeserve.wire import EngineReady, Rest, Stats

_ANY_HOST = ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")
# The fields of `SamplingParams` that a rendered request shows.
_SHOWN_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "logprobs"),
)


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
                "tp_size": run.config.tensor_parallel_size,
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
        """Return the engine's facts. Raise ApiError while there are none."""
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
    return {
        "n": request.n,
        **{name: getattr(request.sampling, name) for name in _SHOWN_SAMPLING},
        "seed": request.seed,
        "stop": list(request.stop),
        "max_tokens": request.longest_output(most),
        "thinking_token_budget": None if budget is None else budget.max_tokens,
    }


_EFFORTS = ("low", "medium", "high")
_UNTOLD = ("key", "path", "file", "dir", "store", "statistics", "prefixes", "config", "model")
_LEVELS = ("1", "2")
_TAGS = ("weights", "kv_cache")


class ServiceRoutes:
    """The service: models, health, metrics, version, and the prefix cache."""

    def __init__(self, services: Services, book: UsageBook) -> None:
        self._services = services
        self._book = book
        has_names = services.run.config.metrics_compat == "vllm"
        self._names = VllmNames(services.run.served_model_names[0]) if has_names else None
        self._description = None if demo_named(services.run.config.model) is None else SENTENCE

    async def health(self, _: Request) -> Response:
        """Answer 200 while this process lives."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Answer 200 if generations are admitted: by an engine that makes progress, or by a sleep that they end."""
        reason = self._services.not_ready_reason()
        if reason is None:
            return json_response({"status": "ready" if self._services.engine.rest is Rest.AWAKE else "asleep"})
        return json_response({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        usage: list[Metric] = []
        with suppress(ApiError):  # the other metrics tell of a store that fails
            usage += usage_metrics(await self._book.accounts())
        text = self._services.metrics.render(self._services.engine.ready, self._names, usage)
        return Response(text, headers={"content-type": CONTENT_TYPE.decode()})

    async def models(self, _: Request) -> Response:
        names = self._services.run.served_model_names
        data = [self._model(name) for name in names]
        pages = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return json_response({"object": "list", "data": data, **pages})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        names = self._services.run.served_model_names
        if name not in names and not self._services.run.takes_any_name:
            raise unknown_model(name, names)
        return json_response(self._model(name))

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Drop every cached prefix that no request uses."""
        self._services.check_serving()
        result = await self._services.command("drop_prefixes", {"namespace": None})
        if result.error is not None:
            raise ApiError(409, result.error[:500], type="server_error", code="reset_failed")
        return json_response({"status": "ok", **result.result})

    def _model(self, name: str) -> dict[str, Any]:
        """Return a model as OpenAI's and Anthropic's clients know it, in one object."""
        ready = self._services.engine.ready
        max_model_len = None if ready is None else ready.max_model_len
        longest = None if ready is None else ready.longest_answer
        created = datetime.fromtimestamp(self._services.created, UTC)
        return {
            "id": name,
            "object": "model",
            "created": self._services.created,
            "owned_by": "moeserve",
            "root": name,
            "parent": None,
            "max_model_len": max_model_len,
            "type": "model",
            "display_name": name,
            "description": self._description,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": max_model_len,
            "max_tokens": max_model_len if longest is None else longest,
            "default_max_tokens": None if ready is None else ready.default_max_tokens,
            "arithmetic": None if ready is None else ready.arithmetic,
            "default_sampling": None if ready is None else ready.default_sampling,
            "thinking": self._thinking(),
            "capabilities": None,
            "lifecycle": "active",
        }

    def _thinking(self) -> dict[str, Any] | None:
        """Return how requests can say whether and how much the model is to think; None for one that does not think."""
        services = self._services
        if services.shape.reasoning == "none":
            return None
        mapped = parse_effort_budgets(services.run.config.reasoning_effort_budgets)
        efforts = _EFFORTS if EFFORT in services.switches else [effort for effort in _EFFORTS if effort in mapped]
        return {"can_be_off": bool(services.switches - {EFFORT}), "efforts": list(efforts)}


class TokenRoutes:
    """`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: the same conversions that generations use."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, request: Request) -> Response:
        """Tokenise `prompt` as `/v1/completions` does, or `messages` as `/v1/chat/completions` does."""
        return await self._converted(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        return await self._converted(request, "detokenize")

    async def count_message(self, request: Request) -> Response:
        """Count the prompt tokens that the request would have on `/v1/messages`."""
        return await self._converted(request, "count_message")

    async def _converted(self, request: Request, kind: Kind) -> Response:
        reply = await self._services.receive(kind, request.scope, request.receive)
        return Response(expect(reply, Body).content, media_type="application/json")


class TraceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`max_tokens` and `token_ids` (keep which tokens they are) belong to `start`."""

    action: Literal["start", "stop"]
    max_tokens: int | None = None
    token_ids: bool = False


class ExpertRoutes:
    """The views of experts and the commands about them, for operators. Every route answers 404 without experts."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def experts(self, _: Request) -> Response:
        """Answer with load, balance and placement by layer and expert."""
        return json_response({"object": "experts", **await self._command("experts")})

    async def save_statistics(self, _: Request) -> Response:
        return json_response({"status": "ok", **await self._command("save_expert_statistics")})

    async def trace(self, request: Request) -> Response:
        """Start recording a trace, or end it and answer with the file."""
        self._check_experts()
        data = await receive_body(request.scope, request.receive, limits.INLINE_BODY_BYTES)
        body, _ = bodies.decode_json(data, TraceBody)
        if body.max_tokens is not None:
            bounded("max_tokens", body.max_tokens, 1, limits.MAX_TOKENS)
        if body.action == "start":
            arguments = {"max_tokens": body.max_tokens, "token_ids": body.token_ids}
            return json_response({"status": "recording", **await self._command("start_expert_trace", arguments)})
        result = await self._command("stop_expert_trace")
        content = await asyncio.to_thread(_read_and_remove, Path(result["file"]))
        return Response(
            content,
            media_type="application/octet-stream",
            headers={"content-disposition": 'attachment; filename="trace.safetensors"'},
        )

    def _check_experts(self) -> None:
        self._services.check_serving()
        ready = self._services.engine.ready
        if ready is not None and not ready.num_experts:
            raise ApiError(404, "This model has no experts that moeserve computes itself", code="no_experts")

    async def _command(self, name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        self._check_experts()
        result = await self._services.command(name, arguments)
        if result.error is not None:
            raise conflict(result.error[:500], "not_possible_now")
        return result.result


def _read_and_remove(path: Path) -> bytes:
    content = path.read_bytes()
    path.unlink()
    return content


class LiveRoutes:
    """Both routes begin with the same: facts about the service, and the samples of the latest minutes."""

    def __init__(self, services: Services, book: UsageBook) -> None:
        self._services = services
        self.stream = StatsStream(services, book)

    async def stats(self, _: Request) -> Response:
        body = msgspec.json.encode({"object": "stats", **_begin(self._services)})
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


class StatsStream:
    """An ASGI endpoint: an event `stats` with all there is, then an event `sample` a second."""

    def __init__(self, services: Services, book: UsageBook) -> None:
        self._services = services
        self._book = book
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_open >= limits.MAX_STATS_STREAMS:
            raise unavailable("Too many watch the figures already", "too_many_streams", 10.0)
        stream = EventStream(send)
        await stream.start()
        if scope["method"] == "HEAD":
            await stream.write(b"", last=True)
            return
        self._num_open += 1
        try:
            await until_disconnect(receive, self._tell(stream, caller_of(scope)))
        finally:
            self._num_open -= 1

    async def _tell(self, stream: EventStream, caller: bytes) -> None:
        """Send samples until the service ends, or the caller's key is not valid any more."""
        live = self._services.live
        latest, coarse = live.latest, live.latest_of_hour
        await stream.write(_event(b"stats", _begin(self._services)))
        while not live.closed:
            sample = await live.next(latest, limits.KEEP_ALIVE_S)
            if sample is not None:
                latest = sample
            events = KEEP_ALIVE if sample is None else _event(b"sample", sample)
            if live.latest_of_hour is not coarse:
                coarse = live.latest_of_hour
                events += _event(b"hour", coarse)
            is_last = live.closed or self._book.holder(caller) is None
            await stream.write(events, last=is_last)
            if is_last:
                return


def _begin(services: Services) -> dict[str, Any]:
    live = services.live
    return {"about": _about(services), "samples": list(live.samples), "hour": list(live.hour)}


def _about(services: Services) -> dict[str, Any]:
    """Return facts that do not change; facts of the engine only once it is ready."""
    ready = services.engine.ready
    facts: dict[str, Any] = {
        "version": VERSION,
        "models": list(services.run.served_model_names),
        "ready": ready is not None,
        "started": services.created,
        "settings": _told_settings(services.run.config),
    }
    if ready is not None:
        facts |= {
            "device": ready.device,
            "dtype": ready.dtype,
            "arithmetic": ready.arithmetic,
            "max_model_len": ready.max_model_len,
            "max_num_seqs": ready.max_num_seqs,
            "num_blocks": ready.num_blocks,
            "block_size": ready.block_size,
            "num_experts": ready.num_experts,
            "weights_bytes": ready.weights_bytes,
            "kv_bytes": ready.kv_bytes,
        }
    return facts


def _told_settings(config: ServeConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without keys, and without places in the file system."""
    usual = ServeConfig()
    names = [field.name for field in fields(config) if getattr(config, field.name) != getattr(usual, field.name)]
    told = {name: getattr(config, name) for name in names if not _is_private(name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def _is_private(name: str) -> bool:
    return any(word in name for word in _UNTOLD)


def _event(name: bytes, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(content))


class SleepRoutes:
    """The sleep of the service. Asleep, it has no engine: neither weights nor KV are in memory."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def sleep(self, request: Request) -> Response:
        """Sleep as soon as no request is open, and answer then. A client that leaves before has asked for nothing."""
        self._check_possible()
        if (level := request.query_params.get("level", "1")) not in _LEVELS:
            raise invalid(f"`level` is 1 or 2, which mean the same here, not {level[:80]!r}", "level")
        if (mode := request.query_params.get("mode", "wait")) != "wait":
            raise invalid(f"`mode` is `wait`: requests are neither aborted nor held, not {mode[:80]!r}", "mode")
        return await self._reach(request, Rest.ASLEEP)

    async def wake_up(self, request: Request) -> Response:
        """Load the model again, and answer once it serves; at once if it does not sleep."""
        if unknown := [tag for tag in request.query_params.getlist("tags") if tag not in _TAGS]:
            raise invalid(f"`tags` are {' and '.join(_TAGS)}, not {unknown[0][:80]!r}", "tags")
        return await self._reach(request, Rest.AWAKE)

    async def is_sleeping(self, _: Request) -> Response:
        """Tell whether the service sleeps, falls asleep or has not woken yet."""
        return json_response({"is_sleeping": self._services.engine.rest is not Rest.AWAKE})

    async def _reach(self, request: Request, rest: Rest) -> Response:
        try:
            await until_disconnect(request.receive, self._services.reach(rest))
        except EngineGone as error:
            raise engine_unavailable(error) from error
        return json_response({"status": "ok", "is_sleeping": rest is Rest.ASLEEP})

    def _check_possible(self) -> None:
        if self._services.run.meets_in_store:
            raise conflict(
                "A service of several nodes, or under a user's torchrun, does not sleep: its ranks could not be "
                "started again from here",
                "cannot_sleep",
            )
