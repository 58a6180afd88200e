"""Steps that are recorded once for each shape and then repeated: they have the bits of steps computed one by one."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from experts.routing.tap import RoutingTap
from kernels.activation import Activation
from kernels.cpu.library import native_kernels
from kernels.cpu.tape import TapeMemory, record
from kernels.kv_rows import KINDS
from kernels.linear import pack_linear, side_by_side
from kernels.moe import moe_experts, pack_experts
from kernels.moe_gate import GateSpec, select_experts, select_experts_reference
from kernels.norm import rms_norm, rms_norm_of_sum
from kernels.ops import CpuOps
from kernels.sampling import Draw, sample
from moeserve.model.decoder import Decoder
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import KVPool
from moeserve.model.repeated_steps import MOST_ROWS
from moeserve.model.runner import ModelRunner
from moeserve.model.weights import load_decoder
from moeserve.plan import Chunk, SamplingParams, StepPlan, StepResult
from tests.support.tiny_models import save

KERNELS = native_kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="There are no compiled kernels.")
BLOCK = 8
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)
# Models whose steps are computed by kernels alone, and others, whose steps are never repeated.
REPEATED = ["llama", "qwen3", "mistral-window", "mixtral", "mixtral-window", "qwen3_moe", "gpt_oss", "glm4_moe"]
NEVER = ["deepseek_v3-yarn", "qwen2_moe", "olmoe"]


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@cache
def _folder(case: str) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    save(case, Path(folder.name))
    return folder


class _Runner:
    """A runner of one model, and how often its layers passed through Python."""

    def __init__(self, case: str, dtype: torch.dtype = torch.float32) -> None:
        folder = Path(_folder(case).name)
        spec = build_spec(load_config(folder))
        tap = None if spec.moe is None else RoutingTap(len(spec.moe_layers), spec.moe.num_experts)
        observers = [] if tap is None else [tap]
        decoder = load_decoder(folder, spec, ops=CpuOps(), max_model_len=96, dtype=torch.float32, observers=observers)
        self.pool = KVPool(spec.kv_layers, 96, BLOCK, dtype)
        self.runner = ModelRunner(decoder, self.pool, tap)

    def launch(self, chunks: list[Chunk]) -> StepResult:
        return self.runner.launch(StepPlan(0, chunks)).result()


@pytest.fixture
def num_passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hold the number of rows of each step whose layers passed through Python."""
    rows: list[int] = []
    whole = Decoder.pass_layers

    def counted(self: Decoder, residual: Tensor, *args: object) -> Tensor:
        rows.append(len(residual))
        return whole(self, residual, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "pass_layers", counted)
    return rows


def _chunk(request: int, tokens: list[int], start: int) -> Chunk:
    table = array("i", range(request * 12, request * 12 + 12))
    return Chunk(f"{request}", array("i", tokens), start, table, GREEDY, num_drafts=len(tokens) - 1)


def _random_steps(rng: random.Random, num_steps: int) -> list[list[Chunk]]:
    """Return steps of one to five requests, each with a few tokens, whose contexts grow by uneven parts."""
    lengths = dict.fromkeys(range(8), 0)
    steps = []
    for _ in range(num_steps):
        chunks = []
        for request in rng.sample(sorted(lengths), rng.randint(1, 5)):
            count = rng.choice((1, 1, 1, 2, 3))
            if lengths[request] + count > 90:
                lengths[request] = 0
            chunks.append(_chunk(request, [rng.randrange(1, 128) for _ in range(count)], lengths[request]))
            lengths[request] += count
        steps.append(chunks)
    return steps


def _compare(case: str, dtype: torch.dtype, steps: list[list[Chunk]], monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = _Runner(case, dtype)
    with monkeypatch.context() as patch:
        patch.setattr("moeserve.model.runner.native_kernels", lambda: None)
        plain = _Runner(case, dtype)
    for chunks in steps:
        found, wanted = repeated.launch(chunks), plain.launch(chunks)
        assert found.chunks == wanted.chunks
        assert (found.routing is None) == (wanted.routing is None)
        if found.routing is not None and wanted.routing is not None:
            assert bytes(found.routing) == bytes(wanted.routing)
    for (keys, values), (other_keys, other_values) in zip(repeated.pool.layers, plain.pool.layers, strict=True):
        assert torch.equal(keys.view(torch.uint8), other_keys.view(torch.uint8))
        if values is not None and other_values is not None:
            assert torch.equal(values.view(torch.uint8), other_values.view(torch.uint8))


@pytest.mark.parametrize("case", REPEATED + NEVER)
def test_random_steps_have_the_bits_of_steps_that_are_not_repeated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(case, torch.float32, _random_steps(random.Random(case), 120), monkeypatch)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_keys_and_values_of_any_dtype_are_stored_and_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare("qwen3_moe", dtype, _random_steps(random.Random(3), 60), monkeypatch)


@pytest.mark.parametrize("case", REPEATED)
def test_layers_pass_through_python_twice_for_each_shape(case: str, num_passed: list[int]) -> None:
    runner = _Runner(case)
    for start in range(6):
        runner.launch([_chunk(0, [5], start)])
        runner.launch([_chunk(0, [5], start), _chunk(3, [7], start)])
        runner.launch([_chunk(4, [7, 8], start)])
    assert num_passed == [1, 2, 2, 1, 2, 2]


@pytest.mark.parametrize("case", NEVER)
def test_steps_that_torch_takes_part_in_are_never_repeated(case: str, num_passed: list[int]) -> None:
    runner = _Runner(case)
    for start in range(5):
        runner.launch([_chunk(0, [5], start)])
    assert num_passed == [1] * 5


def test_prompts_and_large_steps_pass_through_python(num_passed: list[int]) -> None:
    runner = _Runner("qwen3_moe")
    table = array("i", range(12))
    prompt = Chunk("p", array("i", range(1, 9)), 0, table, GREEDY)
    large = Chunk("p", array("i", [3] * (MOST_ROWS + 1)), 0, table, GREEDY, num_drafts=MOST_ROWS)
    for _ in range(3):
        runner.launch([prompt])
        runner.launch([large])
    assert num_passed == [8, MOST_ROWS + 1] * 3


def test_ids_that_a_result_holds_outlive_the_next_steps() -> None:
    runner, plain = _Runner("qwen3_moe"), _Runner("qwen3_moe")
    held, wanted = [], []
    for start in range(8):
        held.append(runner.launch([_chunk(0, [start + 3], start)]).routing)
        wanted.append(bytes(plain.launch([_chunk(0, [start + 3], start)]).routing or b""))
    assert [bytes(ids or b"") for ids in held] == wanted


def test_a_step_that_fails_while_it_is_recorded_leaves_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, plain = _Runner("qwen3_moe"), _Runner("qwen3_moe")
    runner.launch([_chunk(0, [5], 0)])
    with monkeypatch.context() as patch:
        patch.setattr(CpuOps, "attend", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.launch([_chunk(0, [6], 1)])
    for start in range(4):
        steps = [runner.launch([_chunk(0, [9], start)]), plain.launch([_chunk(0, [9], start)])]
        assert steps[0].chunks == steps[1].chunks


def test_a_tape_repeats_kernels_with_new_inputs_and_reuses_memory() -> None:
    assert KERNELS is not None
    first, second, norm = pack_linear(torch.randn(96, 64)), pack_linear(torch.randn(64, 96)), torch.randn(64)
    x, memory = torch.randn(5, 64), TapeMemory()

    def compute() -> Tensor:
        out = x
        for _ in range(20):
            out = rms_norm(second(first(out)), norm, 1e-6)
        return out

    result, tape = record(KERNELS, memory, compute)
    assert tape is not None
    assert torch.equal(result, compute())
    x.copy_(torch.randn(5, 64))
    tape.run()
    assert torch.equal(tape.result, compute())
    _, again = record(KERNELS, memory, compute)
    assert again is not None
    x.copy_(torch.randn(5, 64))
    again.run()
    kept = again.result.clone()
    tape.run()
    assert torch.equal(kept, tape.result)
    assert torch.equal(again.result, kept)


def test_any_operation_of_torch_that_computes_makes_a_sequence_without_a_tape() -> None:
    assert KERNELS is not None
    linear, x = pack_linear(torch.randn(96, 64)), torch.randn(5, 64)
    for other in (torch.exp, lambda y: y.mul_(2), lambda y: y.add_(1.0), lambda y: y + y[:1], torch.zeros_like):
        result, tape = record(KERNELS, TapeMemory(), lambda other=other: other(linear(x)))  # type: ignore[misc]
        assert tape is None
        assert torch.equal(result, other(linear(x)))


def test_experts_and_sums_are_repeated() -> None:
    assert KERNELS is not None
    experts = pack_experts(torch.randn(6, 64, 32), torch.randn(6, 32, 32))
    gate, x, spec = pack_linear(torch.randn(6, 32)), torch.randn(7, 32), GateSpec(2, renormalise=True)

    def compute() -> Tensor:
        ids, weights = select_experts(gate(x), spec)
        return moe_experts(x, ids, weights, experts, Activation()).add_(gate(x) @ zeros if zeros is not None else x)

    zeros = None
    _, tape = record(KERNELS, TapeMemory(), compute)
    assert tape is not None
    x.copy_(torch.randn(7, 32))
    tape.run()
    assert torch.equal(tape.result, compute())


def test_products_side_by_side_have_the_bits_of_each() -> None:
    linears, x = [pack_linear(torch.randn(count, 40)) for count in (48, 17, 33)], torch.randn(6, 40)
    assert torch.equal(side_by_side(linears)(x), torch.cat([linear(x) for linear in linears], 1))


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_the_norm_of_a_sum_has_the_bits_of_its_parts(multiplier: float) -> None:
    x, residual, weight = torch.randn(33, 100), torch.randn(33, 100), torch.randn(100)
    wanted_sum = residual + x * multiplier
    found = rms_norm_of_sum(x.clone(), residual, weight, 1e-6, multiplier)
    assert torch.equal(residual, wanted_sum)
    assert torch.equal(found, rms_norm(wanted_sum, weight, 1e-6))
    parts = torch.randn(9, 3 * 64)
    wanted = rms_norm(parts[:, 64:128], weight[:64], 1e-6)
    rms_norm(parts[:, 64:128], weight[:64], 1e-6, parts[:, 64:128])
    assert torch.equal(parts[:, 64:128], wanted)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10])
@pytest.mark.parametrize("num_experts", [10, 16, 60, 128])
def test_the_choice_of_experts_is_that_of_the_reference(num_experts: int, top_k: int) -> None:
    logits, bias = torch.randn(40, num_experts) * 4, torch.randn(num_experts)
    for spec, correction in (
        (GateSpec(top_k, softmax_after_top_k=True), None),
        (GateSpec(top_k, renormalise=True, scale=1.5), None),
        (GateSpec(top_k), bias),
        (GateSpec(top_k, renormalise=True), bias),
        (GateSpec(top_k, score="sigmoid", renormalise=True, norm_min=1e-20, scale=2.5), bias / 8),
    ):
        found, wanted = select_experts(logits, spec, correction), select_experts_reference(logits, spec, correction)
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-9)
        some = select_experts(logits[11:14], spec, correction)
        assert torch.equal(some[0], found[0][11:14])
        assert torch.equal(some[1], found[1][11:14])


def test_of_equal_logits_the_first_experts_are_chosen_and_what_is_no_number_chooses_experts_that_exist() -> None:
    logits = torch.zeros(3, 12)
    logits[1, 5] = torch.nan
    logits[2] = torch.nan
    ids, weights = select_experts(logits, GateSpec(4, renormalise=True))
    assert ids.tolist() == [[0, 1, 2, 3], [5, 0, 1, 2], [0, 1, 2, 3]]
    assert weights[0].tolist() == [0.25] * 4
    assert weights[1:].isnan().all()


@pytest.mark.parametrize("width", [1, 5, 16, 31, 128, 1000])
def test_the_likeliest_token_is_the_first_of_the_largest_logits(width: int) -> None:
    logits = torch.randn(20, width).round()
    logits[3] = -torch.inf
    logits[4, width // 2] = torch.inf
    logits[5, width // 3 :] = torch.nan
    tokens, largest = sample(logits, [Draw(0.0)] * 20)
    wanted = logits.max(-1)
    assert torch.equal(largest.nan_to_num(99), wanted.values.nan_to_num(99))
    for row in range(20):
        if row != 5:
            assert int(tokens[row]) == int((logits[row] == wanted.values[row]).nonzero()[0])
    assert int(tokens[5]) == width // 3
