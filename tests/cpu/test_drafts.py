"""With draft tokens, on real models, requests get the same tokens and the same bits of log probabilities as without.

The requests are random in all that sampling knows: greedy or not, penalties, biases, grammars, stop tokens, fewest
tokens, log probabilities, choices of one prompt; the batches, chunks and memory are random too. Prompts repeat
themselves, so that drafts are often right and often wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import KvBudget
from moeserve.engine.planner import build_drafts
from moeserve.frontend.dialects.formats import constraint_of
from moeserve.frontend.dialects.internal import OutputFormat
from moeserve.plan import SamplingParams
from moeserve.scheduling.drafting import Drafting
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_model import EOS
from tests.support.tiny_models import build
from tests.support.tiny_mtp import save_with_mtp
from tests.support.tiny_transformers import save_tiny

NUM_REQUESTS = 48
# With six settings that is more than 10,000 requests.
NUM_IN_LONG_SUITE = 1_700
TOGETHER = 12
BASE = ServeConfig(kv_cache_memory=2**21, block_size=4, max_model_len=256)
GRAMMARS = [
    constraint_of(OutputFormat("regex", "(ab|abc|[0-9]{2}-)+")).grammar,
    constraint_of(
        OutputFormat(
            "json_schema",
            {
                "type": "object",
                "properties": {"long_name": {"type": "integer"}, "other_name": {"enum": ["one", "two"]}},
                "required": ["long_name", "other_name"],
                "additionalProperties": False,
            },
        )
    ).grammar,
]


def sampling_of(random: Random, *, grammars: Sequence[str]) -> SamplingParams:
    """Return random parameters, where grammars are given with one of them now and then."""
    grammar = random.choice([*grammars, None, None, None]) if grammars else None
    return SamplingParams(
        max_tokens=random.randrange(1, 48),
        temperature=random.choice([0.0, 0.0, 0.3, 1.3]),
        top_k=random.choice([0, 0, 2, 40]),
        top_p=random.choice([1.0, 0.9]),
        min_p=random.choice([0.0, 0.0, 0.05]),
        presence_penalty=random.choice([0.0, 0.0, 0.5]),
        frequency_penalty=random.choice([0.0, 0.0, 0.3, -0.5]),
        repetition_penalty=random.choice([1.0, 1.0, 1.2]),
        logit_bias=random.choice([None, None, {97: 4.0, 98: 4.0}]),
        seed=random.randrange(100),
        logprobs=random.choice([0, 2]),
        prompt_logprobs=random.choice([None, None, None, 0]),
        min_tokens=random.choice([0, 0, 7]),
        stop_token_ids=(EOS,) if grammar is not None else random.choice([(), (97, 101), (120, 7)]),
        grammar=grammar,
    )


def prompts_of(random: Random) -> list[int]:
    piece = [random.randrange(97, 103) for _ in range(random.randrange(3, 9))]
    return [random.randrange(97, 123), *piece * random.randrange(1, 6), *piece[: random.randrange(len(piece))], 98]


def requests_of(random: Random, count: int, *, grammars: Sequence[str]) -> list[tuple[list[int], SamplingParams]]:
    requests: list[tuple[list[int], SamplingParams]] = []
    while len(requests) < count:
        prompt, sampling = prompts_of(random), sampling_of(random, grammars=grammars)
        for choice in range(random.choice([1, 1, 3])):
            requests.append((prompt, replace(sampling, seed=sampling.seed + choice)))
    return requests


def complete(
    engine: TokenEngine,
    requests: Sequence[tuple[list[int], SamplingParams]],
    predicted: Sequence[Sequence[int]] | None = None,
) -> list[Completion]:
    completions = []
    for first in range(0, len(requests), TOGETHER):
        prompts, samplings = zip(*requests[first : first + TOGETHER], strict=True)
        guesses = None if predicted is None else predicted[first : first + TOGETHER]
        completions += engine.generate(prompts, samplings, predicted=guesses)
    engine.scheduler.check_idle()
    return completions


def answers(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [NUM_REQUESTS, pytest.param(NUM_IN_LONG_SUITE, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize(
    ("kind", "method", "changes"),
    [
        ("grammars", "suffix", {}),
        ("grammars", "auto", {"max_num_batched_tokens": 24, "max_num_seqs": 5}),
        pytest.param("grammars", "ngram", {"enable_prefix_caching": False}, marks=pytest.mark.long),
        ("short of memory", "suffix", {"kv_cache_memory": 80 * 2**10}),
        ("gpt_oss", "suffix", {}),
        ("deepseek_v3-yarn", "suffix", {"max_num_batched_tokens": 24, "max_num_seqs": 5}),
        ("qwen3_next", "suffix", {}),
        ("qwen3_next", "auto", {"max_num_batched_tokens": 24, "max_num_seqs": 20}),
        pytest.param(
            "qwen3_next",
            "ngram",
            {"max_num_batched_tokens": 24, "max_num_seqs": 14, "kv_cache_memory": 260 * 2**10},
            marks=pytest.mark.long,
        ),
        pytest.param("qwen3_5_moe", "suffix", {"max_num_seqs": 30}, marks=pytest.mark.long),
        *(
            pytest.param(f"transformers {kind}", "suffix", {"max_num_seqs": 30}, marks=pytest.mark.long)
            for kind in ("kimi_linear", "jamba")
        ),
        pytest.param("lfm2_moe", "suffix", {"max_num_seqs": 30}, marks=pytest.mark.long),
        pytest.param("mtp glm4_moe", "mtp", {}, marks=pytest.mark.long),
        ("mtp glm4_moe", '{"method": "mtp", "num_speculative_tokens": 3}', {"kv_cache_memory": 280 * 2**10}),
        ("mtp qwen3_next", '{"method": "mtp", "num_speculative_tokens": 4}', {"max_num_seqs": 30}),
    ],
)
def test_random_requests_have_the_same_bits_with_drafts_and_without(
    kind: str, method: str, changes: dict[str, object], count: int, tmp_path: Path
) -> None:
    grammars: Sequence[str] = ()
    if kind in ("grammars", "short of memory"):
        write_tiny_checkpoint(tmp_path)
        grammars = GRAMMARS
    elif kind.startswith("transformers "):
        save_tiny(kind.removeprefix("transformers "), tmp_path)
    elif kind.startswith("mtp "):
        save_with_mtp(kind.removeprefix("mtp "), tmp_path, is_apt=True)
    else:
        build(kind, **({"sliding_window": 9} if kind == "gpt_oss" else {})).save_pretrained(tmp_path)
    requests = requests_of(Random(f"{kind} {method}"), count, grammars=grammars)
    plain = TokenEngine(tmp_path, BASE)
    expected = complete(plain, requests)
    plain.close()
    config = replace(BASE, speculative_config=method, **changes)  # type: ignore[arg-type]
    engine = TokenEngine(tmp_path, config)
    assert answers(complete(engine, requests)) == answers(expected)
    assert isinstance(engine.drafts, Drafting)
    counters = engine.drafts.counters
    if method != "auto":
        assert counters.tokens > sum(counters.accepted) > count / 4
    num_accepted = sum(counters.accepted)
    if kind == "grammars" and method == "suffix" and count == NUM_REQUESTS:
        # The tokens that followed these prompts are cached now, and makes further drafts.
        assert answers(complete(engine, requests)) == answers(expected)
        assert sum(counters.accepted) - num_accepted > 1.5 * num_accepted
    if kind == "short of memory":
        assert engine.scheduler.counters.preemptions > 0
    engine.close()


def edited(random: Random, answer: Sequence[int]) -> list[int]:
    """Return the answer with a token exchanged, others left out or added, or all of it wrong."""
    tokens, place = list(answer), random.randrange(len(answer) + 1)
    match random.randrange(5):
        case 0:
            tokens[place : place + 1] = [97]
        case 1:
            del tokens[place : place + 4]
        case 2:
            tokens[place:place] = [98, 99, 100, 97]
        case 3:
            tokens = [token + 1 for token in tokens]
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("grammars", {"max_num_batched_tokens": 24, "max_num_seqs": 5}),
        ("short of memory", {"kv_cache_memory": 64 * 2**10}),
        ("gpt_oss", {"max_num_batched_tokens": 24, "max_num_seqs": 5}),
    ],
)
def test_random_requests_have_the_same_bits_with_predicted_answers_and_without(
    kind: str, changes: dict[str, int], tmp_path: Path
) -> None:
    random, grammars = Random(kind), [] if kind == "gpt_oss" else GRAMMARS
    if grammars:
        write_tiny_checkpoint(tmp_path)
    else:
        build(kind, sliding_window=9).save_pretrained(tmp_path)
    requests = requests_of(random, NUM_REQUESTS, grammars=grammars)
    plain = TokenEngine(tmp_path, BASE)
    expected = complete(plain, requests)
    plain.close()
    num_right = []
    for predicted in (None, [edited(random, completion.token_ids) for completion in expected]):
        engine = TokenEngine(tmp_path, replace(BASE, speculative_config="ngram", **changes))  # type: ignore[arg-type]
        assert answers(complete(engine, requests, predicted=predicted)) == answers(expected)
        assert isinstance(engine.drafts, Drafting)
        counters = engine.drafts.counters
        num_right.append(sum(counters.accepted))
        if kind == "short of memory":
            assert engine.scheduler.counters.preemptions > 0
        engine.close()
    assert num_right[1] > 1.3 * num_right[0]


def test_drafts_of_models_with_recurrent_states_are_refused_where_steps_are_planned_ahead() -> None:
    kv = KvBudget(64, 256, num_state_slots=256, num_snapshots=4)
    for method in ("ngram", "suffix"):
        config = ServeConfig(speculative_config=method)
        assert build_drafts(config, kv).makes_any
        with pytest.raises(ConfigError, match="recurrent states"):
            build_drafts(config, kv, depth=1)
    config = ServeConfig(speculative_config="auto")
    assert build_drafts(config, kv).makes_any
    for method in ("none", "auto"):
        config = ServeConfig(speculative_config=method)
        assert not build_drafts(config, kv, depth=1).makes_any
