"""Traces of requests that arrive, are given up and push each other out of memory at times drawn by a seed.

Time is the engine's steps, so that a seed plays the same trace on every machine. Each request is one of a fixed set
whose answers are known: they were computed one at a time, without a cache, in memory with room for everything.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from benchmarks.token_engine import TokenEngine, advance
from moeserve.config import ServeConfig
from moeserve.frontend.dialects.formats import constraint_of
from moeserve.frontend.dialects.internal import OutputFormat
from moeserve.plan import FinishReason, Request, SamplingParams, Terms, TokenLogprobs
from tests.support.tiny_model import EOS

_PREFIXES = 6
_MOST_STEPS = 5000
LONGEST = 80


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and, once it was computed alone, its answer."""

    prompt: list[int]
    sampling: SamplingParams
    namespace: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Played:
    """The outcomes of the requests of some traces."""

    traces: int = 0
    requests: int = 0
    aborted: int = 0
    cut: int = 0
    preempted: int = 0
    most_preempted: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A request of a trace. gives_up: the step at which its client leaves. stops: how many output tokens it keeps."""

    asked: Asked
    request: Request
    gives_up: int | None
    stops: int | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)


def _sampling(random: Random, num_tokens: int) -> SamplingParams:
    plain = SamplingParams(num_tokens, temperature=0.0, seed=random.getrandbits(40), stop_token_ids=(EOS,))
    drawn = replace(plain, temperature=1.3)
    return random.choice(
        [
            plain,
            drawn,
            replace(drawn, top_p=0.9, top_k=40, min_p=0.01),
            replace(drawn, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.3),
            replace(drawn, logprobs=3),
            replace(plain, logprobs=0, prompt_logprobs=2),
            replace(drawn, logit_bias={97: 5.0, 98: 4.0, EOS: -100.0}, min_tokens=num_tokens // 2),
            replace(drawn, grammar=constraint_of(OutputFormat("regex", "[a-f ]{30,60}", "x")).grammar),
        ]
    )


def known_requests(model: Path, config: ServeConfig, count: int, seed: int) -> list[Asked]:
    """Return requests whose prompts often begin alike, with their answers."""
    random = Random(seed)
    prefixes = [[random.randrange(256) for _ in range(random.randrange(8, 40))] for _ in range(_PREFIXES)]
    requests = []
    for _ in range(count):
        prompt = [*random.choice([[], *prefixes]), *(random.randrange(256) for _ in range(random.randrange(1, 20)))]
        sampling = _sampling(random, random.randrange(3, LONGEST - len(prompt)))
        requests.append(Asked(prompt, sampling, random.choice("ab")))
    llm = TokenEngine(model, replace(config, enable_prefix_caching=False, kv_cache_memory=64 << 20))
    for asked in requests:
        alone = _Open(asked, _request("alone", asked), None, None)
        _play(llm, {"alone": (0, alone)})
        asked.token_ids.extend(alone.token_ids)
        asked.logprobs.extend(alone.logprobs)
        asked.prompt_logprobs.extend(alone.prompt_logprobs)
    llm.close()
    return requests


def _request(request_id: str, asked: Asked, tenant: str = "", priority: int = 0) -> Request:
    request = Request(request_id, array("i", asked.prompt), asked.sampling, asked.namespace, priority)
    request.terms = Terms(tenant=tenant)
    return request


def play_traces(llm: TokenEngine, requests: Sequence[Asked], count: int, seed: int) -> Played:
    """Play `count` traces, one after another, over one cache. Lost blocks raise AssertionError."""
    played = Played()
    for number in range(count):
        random = Random(f"{seed} {number}")
        arriving: dict[str, tuple[int, _Open]] = {}
        step = 0
        for place in range(random.randrange(3, 13)):
            step += random.choice((0, 0, 0, 1, 2, random.randrange(20)))
            asked, tenant, priority = random.choice(requests), random.choice("xyz"), random.choice((0, 0, 0, 1, -1))
            request = _request(f"{number}.{place}", asked, tenant, priority)
            leaves = step + random.randrange(40) if random.random() < 0.3 else None
            stops = random.randrange(1, 1 + len(asked.token_ids)) if random.random() < 0.1 else None
            arriving[request.request_id] = (step, _Open(asked, request, leaves, stops))
        _play(llm, arriving)
        _check(played, arriving)
    return played


def _play(llm: TokenEngine, arriving: dict[str, tuple[int, _Open]]) -> None:
    """Play one trace to its end."""
    waiting = sorted(arriving.values(), key=lambda entry: entry[0])
    requests = {name: entry for name, (_, entry) in arriving.items()}
    scheduler = llm.scheduler
    for step in range(_MOST_STEPS):
        while waiting and waiting[0][0] <= step:
            scheduler.add(waiting.pop(0)[1].request)
        for name, entry in requests.items():
            if entry.gives_up == step and not entry.ends and (ended := scheduler.abort(name)) is not None:
                entry.ends.append(ended.finish_reason or FinishReason.ERROR)
        outputs = advance(llm.steps, llm.masks)
        for output in outputs or ():
            entry = requests[output.request.request_id]
            if output.token_id is not None:
                entry.token_ids.append(output.token_id)
                entry.logprobs.append(output.logprobs)
            entry.prompt_logprobs += output.prompt_logprobs or ()
            if output.finish_reason is not None:
                entry.ends.append(output.finish_reason)
            elif entry.stops is not None and len(entry.token_ids) >= entry.stops:
                ended = scheduler.finish(output.request.request_id, entry.stops)
                assert ended is not None
                entry.ends.append(FinishReason.STOP)
        if outputs is None and not waiting:
            scheduler.take_started()
            # Every block has one holder, or it is free or cached.
            scheduler.check_idle()
            return
    raise AssertionError("a trace has no end")


def _check(played: Played, arriving: dict[str, tuple[int, _Open]]) -> None:
    """Count the ends of a trace's requests, and note answers that differ from the request's alone."""
    played.traces += 1
    for name, (_, entry) in arriving.items():
        asked, num_tokens = entry.asked, len(entry.token_ids)
        played.requests += 1
        played.preempted += entry.request.num_preemptions
        played.most_preempted = max(played.most_preempted, entry.request.num_preemptions)
        left = entry.ends == [FinishReason.ABORT]
        played.aborted += left
        played.cut += entry.stops is not None and not left
        whole = len(asked.token_ids) if entry.stops is None else entry.stops
        same = entry.token_ids == asked.token_ids[:num_tokens] and entry.logprobs == asked.logprobs[:num_tokens]
        same = same and entry.prompt_logprobs == asked.prompt_logprobs[: len(entry.prompt_logprobs)]
        if not left:
            same = same and num_tokens == whole and len(entry.prompt_logprobs) == len(asked.prompt_logprobs)
        if len(entry.ends) != 1 or not same:
            played.wrong.append(f"{name}: ends {entry.ends}, {num_tokens} of {whole} tokens, {asked.sampling}")
