"""The GPU's runner serves as the CPU's does: the same greedy tokens, by either loop, in new or lasting batches."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.tap import RoutingTap
from moeserve.device import KvBudget
from moeserve.engine.experts.observe import ExpertRecording, RecordingPlan, routing_shape
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu.model import GpuSettings, make_runner
from moeserve.model.gpu.runner import GpuModelRunner
from moeserve.model.kv_pool import KVPool
from moeserve.model.runner import ModelRunner
from moeserve.model.spec import DecoderSpec
from moeserve.model.weights import load_decoder
from moeserve.plan import Chunk, ChunkExtras, Request, SamplingParams, StepPlan
from moeserve.scheduling.parts import Part
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import LocalExecutor, RanksObserver, Runner, Steps
from radix_cache import PrefixCache
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.tiny_models import save

pytestmark = pytest.mark.kernel_change

MAX_LEN, NUM_BLOCKS, BLOCK_SIZE = 32, 24, 4
PROMPTS = [[3, 14, 15, 92, 65, 35, 89], [3, 14, 15, 92, 65, 7], [27, 18]]
MODELS = ("mixtral", "llama")
GREEDY = [SamplingParams(max_tokens=3, temperature=0.0)] * len(PROMPTS)


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save(request.param, directory)
    return directory


@dataclass
class Served:
    """The tokens of serving, and the recording of its experts."""

    tokens: list[list[int]]
    recording: ExpertRecording | None

    def routing(self) -> dict[tuple[int, int], tuple[int, list[object]]]:
        """By request and place among its tokens: the token and its experts in all layers but the last."""
        assert self.recording is not None
        assert self.recording.trace is not None
        self.recording.gather()
        trace = self.recording.trace.trace()
        assert trace is not None
        found: dict[tuple[int, int], tuple[int, list[object]]] = {}
        places = Counter[int]()
        for row, request in enumerate(trace.requests.tolist()):
            found[request, places[request]] = int(trace.token_ids[row]), np.sort(trace.ids[:, row]).tolist()
            places[request] += 1
        return found


@pytest.fixture(scope="module")
def on_cpu(model_dir: Path) -> Served:
    spec = build_spec(load_config(model_dir))
    tap = tap_of(spec)
    decoder = load_decoder(model_dir, spec, max_model_len=MAX_LEN, observers=[] if tap is None else [tap])
    pool = KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    return serve(ModelRunner(decoder, pool, tap), spec, GREEDY, depth=0)


@pytest.fixture(scope="module")
def alone(model_dir: Path, device: torch.device) -> Served:
    """Every step in a batch of its own, waited for."""
    return serve(make(model_dir, device, enforce_eager=True), spec_of(model_dir), GREEDY, depth=0)


@pytest.fixture(scope="module")
def ahead(model_dir: Path, device: torch.device) -> Served:
    """Decodes in lasting batches, which are padded, planned before the tokens are known."""
    return serve(make(model_dir, device, enforce_eager=False), spec_of(model_dir), GREEDY, depth=1)


def spec_of(model_dir: Path) -> DecoderSpec:
    return build_spec(load_config(model_dir))


def tap_of(spec: DecoderSpec) -> RoutingTap | None:
    return None if spec.moe is None else RoutingTap(len(spec.moe_layers), spec.moe.num_experts)


def make(model_dir: Path, device: torch.device, *, enforce_eager: bool) -> GpuModelRunner:
    spec = spec_of(model_dir)
    settings = GpuSettings(BLOCK_SIZE, 4, 16, MAX_LEN, None, 0.9, enforce_eager)
    tap = tap_of(spec)
    decoder = build_gpu_decoder(
        model_dir,
        spec,
        dtype=torch.float32,
        device=device,
        max_tokens=16,
        max_model_len=MAX_LEN,
        observers=[] if tap is None else [tap],
    )
    return make_runner(decoder, KvBudget(NUM_BLOCKS, MAX_LEN), settings, tap=tap)


def serve(
    runner: Runner,
    spec: DecoderSpec,
    sampling: list[SamplingParams],
    *,
    depth: int,
    parts: Sequence[Part] = (),
) -> Served:
    recording, shape = None, routing_shape(spec)
    observers = list[RanksObserver]()
    if shape is not None:
        statistics = RoutingStatistics(StatisticsSpec(shape.num_layers, shape.num_experts, shape.top_k))
        recording = ExpertRecording(RecordingPlan(shape, statistics, ""))
        recording.start_trace(with_token_ids=True)
        observers.append(recording)
    scheduler = Scheduler(
        [PrefixCache(NUM_BLOCKS, BLOCK_SIZE)],
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_num_queued_reqs=9,
        max_model_len=MAX_LEN,
        run_ahead=depth > 0,
        parts=parts,
    )
    steps = Steps(scheduler, LocalExecutor(runner), depth, observers)
    for number, (prompt, own) in enumerate(zip(PROMPTS, sampling, strict=True)):
        scheduler.add(Request(f"{number}", array("i", prompt), own))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while (outputs := steps.advance()) is not None or any(part.wait(0.002) for part in parts):
        for output in outputs or ():
            assert output.error is None
            if output.token_id is not None:
                tokens[int(output.request.request_id)].append(output.token_id)
    scheduler.check_idle()
    return Served(tokens, recording)


def test_both_loops_and_both_kinds_of_batches_give_the_tokens_of_the_cpu(
    on_cpu: Served, alone: Served, ahead: Served
) -> None:
    assert alone.tokens == on_cpu.tokens
    assert ahead.tokens == on_cpu.tokens


def test_what_gates_choose_is_recorded_of_the_same_tokens_as_on_a_cpu(
    on_cpu: Served, alone: Served, ahead: Served
) -> None:
    """Not of rows that pad a batch, and with the tokens that were not known when the step was planned."""
    if on_cpu.recording is None:
        assert ahead.recording is None
        return
    routing = on_cpu.routing()
    assert len(routing) > sum(map(len, on_cpu.tokens))
    assert {token for token, _ in routing.values()} >= set(on_cpu.tokens[0][:-1])
    load = on_cpu.recording.statistics().load()
    for served in (alone, ahead):
        assert served.recording is not None
        assert served.routing() == routing
        np.testing.assert_allclose(served.recording.statistics().load(), load, rtol=1e-3)


def test_draws_biases_penalties_and_log_probabilities(model_dir: Path, device: torch.device) -> None:
    if "llama" not in str(model_dir):
        pytest.skip("sampling does not depend on the model")
    runner = make(model_dir, device, enforce_eager=False)
    wishes = [
        SamplingParams(max_tokens=2, temperature=1.5, top_k=20, top_p=0.9, seed=5, logprobs=2),
        SamplingParams(max_tokens=2, temperature=0.0, logit_bias={77: 1000.0}, prompt_logprobs=1),
        SamplingParams(max_tokens=4, temperature=0.0, repetition_penalty=1e6, logit_bias={41: 50.0}, min_tokens=3),
    ]
    spec = spec_of(model_dir)
    drawn = serve(runner, spec, wishes, depth=0).tokens
    assert drawn[1] == [77, 77]
    assert drawn[2][0] == 41
    assert len(set(drawn[2])) == 4
    assert serve(runner, spec, wishes, depth=1).tokens == drawn


def test_a_grammar_holds_beside_requests_without_one(model_dir: Path, device: torch.device, tmp_path: Path) -> None:
    if "llama" not in str(model_dir):
        pytest.skip("grammars do not depend on the model")
    pytest.importorskip("llguidance")
    pytest.importorskip("msgspec")
    from moeserve.grammars.masks import GrammarMasks
    from moeserve.scheduling.grammars import Drafts, Grammars
    from tests.support.tiny_model import write_model_dir

    spec, eos = spec_of(model_dir), 127
    tokenizer_json = write_model_dir(tmp_path) / "tokenizer.json"
    # One of the model's 128 logits ends the output; the tokenizer has more tokens than there are logits.
    runner = make(model_dir, device, enforce_eager=False)
    masks = GrammarMasks(tokenizer_json, spec.vocab_size, [eos])
    bound = SamplingParams(max_tokens=9, temperature=1.5, stop_token_ids=(eos,), grammar='start: "ab" /[0-9]/')
    wishes = [GREEDY[0], bound, replace(bound, seed=3)]
    without = serve(runner, spec, GREEDY, depth=0).tokens[0]
    for depth in (0, 1):
        plain, *texts = serve(runner, spec, wishes, depth=depth, parts=[Grammars(masks, Drafts())]).tokens
        assert plain == without
        for tokens in texts:
            assert tokens[-1] == eos
            assert re.fullmatch(rb"ab\d", bytes(tokens[:-1]))
    masks.close()


def test_a_prompt_is_scored_in_parts_with_the_log_probabilities_of_the_cpu(
    model_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "llama" not in str(model_dir):
        pytest.skip("scoring does not depend on the model")
    monkeypatch.setattr("moeserve.model.sampler.SCORED_AT_ONCE", 3)
    spec, prompt = spec_of(model_dir), array("i", PROMPTS[0])
    scored = ChunkExtras(prompt_targets=prompt[1:], num_top_logprobs=2)
    plan = StepPlan(
        0,
        [
            Chunk("plain", array("i", PROMPTS[2]), 0, array("i", [5]), GREEDY[0]),
            Chunk("scored", prompt, 0, array("i", [2, 9]), GREEDY[0], scored),
        ],
    )
    decoder = load_decoder(model_dir, spec, max_model_len=MAX_LEN)
    expected = ModelRunner(decoder, KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, torch.float32)).launch(plan).result()
    runner = make(model_dir, device, enforce_eager=False)
    on_device, pieces = runner._computes.decoder, []
    forward = on_device.logits
    monkeypatch.setattr(on_device, "logits", lambda states: pieces.append(len(states)) or forward(states))
    found = runner.launch(plan).result()
    assert [chunk.token_id for chunk in found.chunks] == [chunk.token_id for chunk in expected.chunks]
    assert found.chunks[0].prompt_logprobs is None
    of_cpu = expected.chunks[1].prompt_logprobs
    assert of_cpu is not None
    assert len(of_cpu) == len(prompt) - 1
    for one, other in zip(found.chunks[1].prompt_logprobs, of_cpu, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    # Never more logits at once than that.
    assert pieces == [2, 3, 3]


def test_a_seed_draws_the_tokens_that_it_draws_on_a_cpu(model_dir: Path, device: torch.device) -> None:
    if "llama" not in str(model_dir):
        pytest.skip("sampling does not depend on the model")
    spec = spec_of(model_dir)
    wishes = [
        SamplingParams(max_tokens=1, temperature=1.5, seed=5),
        SamplingParams(max_tokens=1, temperature=1.5, seed=2**63 + 7, top_k=40, top_p=0.9, min_p=0.01),
        SamplingParams(max_tokens=1, temperature=0.8, seed=3, min_p=0.02, logit_bias={7: 2.0}),
    ]
    plan = StepPlan(
        0,
        [
            Chunk(str(place), array("i", PROMPTS[2]), 0, array("i", [5 + place]), sampling)
            for place, sampling in enumerate(wishes)
        ],
    )
    decoder = load_decoder(model_dir, spec, max_model_len=MAX_LEN)
    on_cpu = ModelRunner(decoder, KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, torch.float32)).launch(plan).result()
    found = make(model_dir, device, enforce_eager=True).launch(plan).result()
    assert [chunk.token_id for chunk in found.chunks] == [chunk.token_id for chunk in on_cpu.chunks]
