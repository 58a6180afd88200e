"""`--dtype bfloat16` on a CPU: rows rounded to bfloat16 times weights of bfloat16, with the same bits in any batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.token_engine import Completion, TokenEngine
from kernels.activation import Activation
from kernels.cpu.experts import PanelLayout
from kernels.cpu.library import NativeKernels, native_kernels
from kernels.linear import pack_linear
from kernels.moe import moe_experts_reference
from kernels.packed_experts import ExpertShape, PackedExperts
from kernels.weight_formats import FP8_BLOCK, FP8_FORMATS, WeightFormat, rows_of_fp8
from moeserve.config import ServeConfig
from moeserve.engine.assemble import arithmetic_of
from moeserve.engine.memory_plan import plan_model, read_spec, rounding_of
from moeserve.engine.weight_bytes import weights_bytes
from moeserve.model.checkpoint import read_index
from moeserve.plan import SamplingParams
from tests.support.llm_prompts import (
    BASE,
    PROMPTS,
    SAMPLINGS,
    assert_same,
    assert_same_cold_and_cached,
    complete_alone,
    in_any_batch,
    small_engine,
)
from tests.support.quantised_files import deepseek, quantise_checkpoint
from tests.support.quantised_rows import random_rows
from tests.support.tiny_models import build, save

NATIVE = native_kernels()
pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(NATIVE is None, reason="There are no compiled kernels."),
]
CONFIG = replace(BASE, dtype="bfloat16")
FP8_MODEL = "mixtral in fp8"
NUM_EXPERTS, HIDDEN, WIDTH = 6, 80, 40


@pytest.mark.parametrize("depth", [1, 2, 31, 33, 64, 577])
def test_a_product_is_that_of_rounded_rows(depth: int) -> None:
    weight, bias, x = torch.randn(70, depth).bfloat16(), torch.randn(70), torch.randn(14, depth)
    found = pack_linear(weight, bias, torch.float32, narrow_rows=True)(x)
    wanted = x.bfloat16().double() @ weight.double().T + bias
    torch.testing.assert_close(found, wanted.float(), atol=1e-5 * depth**0.5, rtol=1e-5)


def chain(x: Tensor, weight: Tensor, depths: Iterable[int], start: Tensor) -> Tensor:
    """Add products at some depths to `start`, each of them by one rounding: float64 holds what is rounded."""
    for k in depths:
        start = (start.double() + x[:, k, None].double() * weight[None, :, k].double()).float()
    return start


@pytest.mark.parametrize("depth", [2, 31, 64, 577])
def test_a_product_is_summed_in_the_documented_order(depth: int) -> None:
    assert NATIVE is not None
    x, weight = torch.randn(37, depth).bfloat16(), torch.randn(70, depth).bfloat16()
    found = pack_linear(weight, None, torch.float32, narrow_rows=True)(x.float())
    zeros = torch.zeros(37, 70)
    sums = zeros
    if NATIVE.sums_as_tiles:
        for first in range(0, depth, 32):
            last = min(first + 32, depth)
            even, odd = (chain(x, weight, range(first + parity, last, 2), zeros) for parity in (0, 1))
            sums = sums + (even + odd)
    else:
        pairs = (pair for k in range(0, depth, 2) for pair in (k + 1, k) if pair < depth)
        sums = chain(x, weight, pairs, zeros)
    assert torch.equal(found, sums)


def test_a_row_of_a_product_has_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    linear = pack_linear(torch.randn(160, 95).bfloat16(), None, torch.float32, narrow_rows=True)
    x, threads = torch.randn(430, 95), torch.get_num_threads()
    whole = linear(x)
    try:
        for number in range(600):
            torch.set_num_threads(1 + number % 3)
            rows = torch.randperm(430)[: int(torch.randint(1, 60, ()))]
            assert torch.equal(linear(x[rows]), whole[rows])
    finally:
        torch.set_num_threads(threads)


def test_a_row_in_bfloat16_that_is_not_finite_spoils_itself_alone() -> None:
    linear, x = pack_linear(torch.randn(64, 96).bfloat16(), None, torch.float32, narrow_rows=True), torch.randn(5, 96)
    wanted = linear(x)
    x[2, 77] = float("nan")
    found = linear(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


@pytest.mark.parametrize("form", FP8_FORMATS, ids=lambda form: form.name)
def test_floats_of_8_bits_multiply_rounded_rows_with_the_same_bits_in_any_batch(form: WeightFormat) -> None:
    rows, bias, x = random_rows(form, 70, 256), torch.randn(70), torch.randn(150, 256)
    linear = pack_linear(rows, bias, narrow_rows=True)
    whole, wanted = linear(x), x.bfloat16().double() @ rows.dequantise().double().T
    assert ((whole - bias - wanted).abs().max() / wanted.std()).item() < 1e-5
    for _ in range(300):
        some = torch.randperm(150)[: int(torch.randint(1, 40, ()))]
        assert torch.equal(linear(x[some]), whole[some])


@pytest.mark.parametrize("form", FP8_FORMATS, ids=lambda form: form.name)
def test_no_float_of_8_bits_changes_its_value(form: WeightFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8).where(torch.arange(256) & 127 != 127, 0)
    rows = rows_of_fp8(codes.view(torch.float8_e4m3fn).repeat(32, 1), torch.rand(32, 2 if form is FP8_BLOCK else 8))
    assert rows.format is form
    assert torch.equal(pack_linear(rows, narrow_rows=True)(torch.eye(256)).T, rows.dequantise())


def test_experts_of_floats_of_8_bits_multiply_rounded_rows_with_the_same_bits_in_any_batch() -> None:
    assert NATIVE is not None
    hidden, width, activation = 256, 128, Activation()
    shape = ExpertShape(hidden, width, torch.float32, torch.float32, formats=(FP8_BLOCK, FP8_BLOCK), narrow_rows=True)
    layout = PanelLayout(shape, NATIVE)
    experts, matrices = layout.experts(NUM_EXPERTS), []
    for e in range(NUM_EXPERTS):
        matrices.append((random_rows(FP8_BLOCK, 2 * width, hidden), random_rows(FP8_BLOCK, hidden, width)))
        experts.put(e, layout.pack((*matrices[-1], None, None)))
    gate_up, down = (torch.stack([pair[i].dequantise() for pair in matrices]) for i in (0, 1))
    x, weights = torch.randn(90, hidden) / 8, torch.rand(90, 3)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:3] for _ in x])
    whole = experts(x, ids, weights, activation)
    wanted = moe_experts_reference(x.bfloat16().float(), ids, weights, gate_up, down, activation)
    assert ((whole - wanted).abs().max() / wanted.std()).item() < 0.02
    for _ in range(100):
        rows = torch.randperm(90)[: int(torch.randint(1, 40, ()))]
        assert torch.equal(experts(x[rows], ids[rows], weights[rows], activation), whole[rows])


def make_experts(activation: Activation) -> tuple[PackedExperts, Tensor, Tensor]:
    gate_up = (torch.randn(NUM_EXPERTS, (1 + activation.is_gated) * WIDTH, HIDDEN) / 8).bfloat16()
    down = (torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / 8).bfloat16()
    shape = ExpertShape(HIDDEN, WIDTH, torch.float32, torch.bfloat16, is_gated=activation.is_gated, narrow_rows=True)
    assert NATIVE is not None
    layout = PanelLayout(shape, NATIVE)
    experts = layout.experts(NUM_EXPERTS)
    for e in range(NUM_EXPERTS):
        experts.put(e, layout.pack((gate_up[e], down[e], None, None)))
    return experts, gate_up, down


@pytest.mark.parametrize("activation", [Activation(), Activation("relu2")], ids=lambda activation: activation.kind)
def test_experts_multiply_rounded_rows_with_the_same_bits_in_any_batch(activation: Activation) -> None:
    experts, gate_up, down = make_experts(activation)
    x = torch.randn(150, HIDDEN)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:3] for _ in x])
    weights = torch.rand(150, 3)
    whole = experts(x, ids, weights, activation)
    wanted = moe_experts_reference(x.bfloat16().float(), ids, weights, gate_up, down, activation)
    # The reference does not round the activations between the two products.
    torch.testing.assert_close(whole, wanted, atol=0.02, rtol=0.02)
    for _ in range(300):
        rows = torch.randperm(150)[: int(torch.randint(1, 40, ()))]
        assert torch.equal(experts(x[rows], ids[rows], weights[rows], activation), whole[rows])


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss", "deepseek_v3-yarn", "qwen3_next", FP8_MODEL])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == FP8_MODEL:
        build("mixtral", intermediate_size=128).save_pretrained(directory)
        quantise_checkpoint(directory, *deepseek(128, 128))
    else:
        save(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[Completion]:
    return complete_alone(model_dir, config=CONFIG)


@in_any_batch
def test_products_of_bfloat16_give_the_same_bits_in_any_batch_and_chunking_cold_and_cached(
    model_dir: Path, alone: list[Completion], changes: dict[str, object]
) -> None:
    assert_same_cold_and_cached(TokenEngine(model_dir, replace(CONFIG, **changes)), alone)  # type: ignore[arg-type]


def test_requests_preempted_beside_products_of_bfloat16_end_with_the_same_bits(
    model_dir: Path, alone: list[Completion]
) -> None:
    llm = small_engine(model_dir, 24, max_num_seqs=8, max_num_batched_tokens=16, dtype="bfloat16")
    assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)


class Operations(TorchDispatchMode):
    """Counts the operations of torch, and the functions of the compiled kernels, that are called meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        for name in NativeKernels.__annotations__:
            monkeypatch.setattr(NATIVE, name, self._counted(name, getattr(NATIVE, name)))

    def _counted(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.found[name] += 1
            return function(*arguments)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


# Prompts, their tokens, and the tokens of each answer.
LOADS = {"a prompt": (1, 150, 1), "a stream": (1, 5, 12), "streams": (24, 3, 6)}


@pytest.mark.parametrize("load", LOADS)
def test_no_load_takes_an_operation_in_bfloat16_that_it_does_not_take_in_float32(
    load: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, length, tokens = LOADS[load]
    prompts = [[1 + (number + place) % 100 for place in range(length)] for number in range(count)]
    found = {}
    for dtype in ("float32", "bfloat16"):
        with monkeypatch.context() as patches:
            operations = Operations(patches)
            config = replace(BASE, dtype=dtype, enable_prefix_caching=False, speculative_config="none")
            engine = TokenEngine(model_dir, config)
            operations.found.clear()
            with operations:
                engine.generate(prompts, SamplingParams(tokens, temperature=0.0))
            found[dtype] = operations.found
    assert found["bfloat16"] - found["float32"] == Counter()
    assert found["float32"].total() > 0


def test_weights_of_a_checkpoint_in_float32_take_half_the_memory(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    planned = {}
    for config in (BASE, CONFIG):
        spec, dtype = read_spec(tmp_path, config)
        assert dtype == torch.float32
        index = read_index(tmp_path)
        planned[config.dtype] = weights_bytes(spec, dtype, index, rounding=rounding_of(config, spec, index))
    assert planned["bfloat16"] < 0.6 * planned[BASE.dtype]


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, quantization="int8")], ids=["bfloat16", "int8 too"])
def test_the_service_says_how_it_multiplies(tmp_path: Path, config: ServeConfig) -> None:
    save("mixtral", tmp_path)
    said = arithmetic_of(plan_model(tmp_path, config), config)
    assert "products of bfloat16" in said
    assert ("weights int8" in said) == (config.quantization == "int8")
