"""Experts of models on transformers' code: with fewer slots than experts, and shared out to ranks.

Whichever way a checkpoint stores them, tokens are the same as with all of them in memory.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks.token_engine import TokenEngine
from experts.memory.file import round_to_page
from experts.observer import AnyObserver
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import plan_model, read_any_spec, rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_store import layouts_in_store
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.hf.gates import _projections
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.model.tensor_reader import dequantise_mxfp4
from moeserve.plan import SamplingParams
from tests.support.checkpoints import change_tensors
from tests.support.expert_files import wait_until_written
from tests.support.forking import popen
from tests.support.fp8 import to_fp8
from tests.support.gguf_export import in_blocks
from tests.support.gguf_modules import tiny, write_module_gguf
from tests.support.packed_models import quantise_in, save_wide
from tests.support.tiny_transformers import save_tiny
from tests.support.transformers_rank import NUM_TOKENS, PROMPTS, Job, Said, config_of

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
BASE = ServeConfig(
    kv_cache_memory=2**20,
    block_size=4,
    max_model_len=96,
    max_num_batched_tokens=24,
    max_num_seqs=4,
    model_impl="transformers",
)
_SLOTS = 3
# A tensor for each expert's gate, up and down; one for all, transposed, with alternating channels and biases; one for
# all, transposed; one for all under other names; one for all through a conversion; all below each other; a tensor for
# each, those of images behind.
_LAYOUTS = ("lfm2_moe", "gpt_oss", "aria", "granitemoehybrid", "qwen3_vl_moe", "dbrx", "ernie4_5_vl_moe")


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def few_slots(directory: Path) -> int:
    """Return the bytes of `_SLOTS` experts in each layer."""
    spec, dtype = read_any_spec(directory, BASE)
    layouts = layouts_in_store(directory, spec, dtype, rounding_of(BASE, spec, read_index(directory)))
    return _SLOTS * len(spec.moe_layers) * round_to_page(layouts.num_bytes)


@pytest.mark.parametrize("model_type", _LAYOUTS)
def test_few_slots_change_no_bit(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 128) for _ in range(count)] for count in (40, 5, 9)]
    whole = TokenEngine(tmp_path, BASE)
    expected = [whole.generate(prompts, GREEDY) for _ in range(2)]
    prefetch = "affinity" if model_type == "aria" else "gate"
    memory, store = few_slots(tmp_path), str(tmp_path / "store")
    llm = TokenEngine(tmp_path, replace(BASE, expert_memory=memory, expert_store_dir=store, expert_prefetch=prefetch))
    assert llm.experts is not None
    for completions in expected:
        # The first time out of the checkpoint, while the expert file is written.
        assert llm.generate(prompts, GREEDY) == completions
        wait_until_written()
    stats = llm.experts.stats()
    assert stats.counters.num_misses > 10
    assert all(len(layer) <= _SLOTS for layer in stats.resident)
    assert {count.source for count in stats.recall} == {"affinity" if prefetch == "affinity" else "gate-early"}
    llm.close()


class Heard(AnyObserver):
    """The input and the choice of each gate in the step that was computed last."""

    def __init__(self) -> None:
        self.choices: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_passed = 0

    def passed(self) -> None:
        self.num_passed += 1

    def gated(self, layer: int, x: Tensor, expert_ids: Tensor) -> None:
        self.choices[layer] = x, expert_ids


@pytest.mark.parametrize(("model_type", "is_found"), [("glm_moe_dsa", True), ("gemma4", False)])
@torch.inference_mode()
def test_a_gate_is_found_by_what_it_chooses(model_type: str, is_found: bool, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    heard = Heard()
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path), observers=[heard])
    decoder.settle(lambda _: None)
    gates = decoder.gated_blocks()
    assert len(gates) == len(decoder.spec.moe_layers) * is_found
    heard.num_passed = 0
    next(decoder.own_states([range(3, 128)]))
    assert heard.num_passed == decoder.spec.num_layers
    for (gate, norm), (x, chosen) in zip(gates, heard.choices.values(), strict=is_found):
        ranked = gate.preview(x).topk(chosen.shape[1]).indices
        assert torch.equal(ranked.sort().values, chosen.sort().values)
        # A state of unit norm, scaled by the norm's weight.
        assert torch.allclose((x / norm).square().mean(-1), torch.ones(len(x)), atol=1e-3)


# Listed experts beside short convolutions; packed ones with biases; an indexer, an expert of all tokens, few slots;
# GPTQ in few slots; a GGUF file; experts brought to the common form, of one type in few slots.
_ON_RANKS = (
    ("lfm2_moe", False),
    ("gpt_oss", False),
    ("glm_moe_dsa", True),
    ("hunyuan_v1_moe", True),
    ("afmoe", False),
    ("dbrx", True),
    ("ernie4_5_vl_moe", False),
)


def _model_for_ranks(model_type: str, folder: Path) -> Path:
    """Write a model; return its folder."""
    if model_type == "afmoe":
        code = tiny(model_type)
        code.outer.save_pretrained(folder)
        write_module_gguf(folder / "tiny.gguf", model_type, code, folder, in_blocks)
        return gguf_folder(folder / "tiny.gguf", folder / "cache")
    if model_type == "hunyuan_v1_moe":
        quantise_in("gptq", save_wide(model_type, folder))
        return folder
    save_tiny(model_type, folder)
    if model_type == "gpt_oss":
        in_mxfp4(folder)
    return folder


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[list[Said]]]:
    """Return what two ranks said of each model, one model after another."""
    folder = tmp_path_factory.mktemp("ranks")
    models = [_model_for_ranks(model_type, folder / model_type) for model_type, _ in _ON_RANKS]
    memory = [few_slots(model) * few for model, (_, few) in zip(models, _ON_RANKS, strict=True)]
    job = Job([str(model) for model in models], memory, str(folder / "meeting"))
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    command = [sys.executable, "-m", "tests.support.transformers_rank", str(folder / "job.json")]
    ranks = [popen([*command, rank], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in "01"]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    lines = [[line for line in of_rank.splitlines() if line.startswith("{")] for of_rank in said]
    return job, [[Said(**json.loads(line)) for line in of_model] for of_model in zip(*lines, strict=True)]


@pytest.mark.parametrize("number", range(len(_ON_RANKS)), ids=[name for name, _ in _ON_RANKS])
def test_two_ranks_give_the_tokens_of_one(number: int, of_ranks: tuple[Job, list[list[Said]]]) -> None:
    job, said = of_ranks
    llm = TokenEngine(job.folders[number], config_of(Path(job.folders[number])))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    for rank, prompts in enumerate(PROMPTS):
        assert said[number][rank].tokens == [llm.generate([prompt], sampling)[0].token_ids for prompt in prompts]


def test_ranks_hold_their_experts_alone_and_exchange_some_while_serving(
    of_ranks: tuple[Job, list[list[Said]]],
) -> None:
    for first, second in of_ranks[1]:
        for one, other in zip(first.held, second.held, strict=True):
            assert sorted(one + other) == list(range(8))
            assert len(one) == 4
        assert len(set(first.held[0]) - set(first.held[1])) == 1


def test_ranks_record_what_the_gates_of_transformers_chose(of_ranks: tuple[Job, list[list[Said]]]) -> None:
    for of_model in of_ranks[1]:
        for said, prompts in zip(of_model, PROMPTS, strict=True):
            assert sum(said.chosen) == 2 * sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts)
            assert sum(map(bool, said.chosen)) > 2


def in_fp8(directory: Path) -> dict[str, Tensor]:
    return to_fp8(directory, (16, 32))


def in_mxfp4(directory: Path) -> dict[str, Tensor]:
    """As gpt-oss is published. Return the values that the experts stand for, by name."""
    values: dict[str, Tensor] = {}
    draw = torch.Generator().manual_seed(2)

    def compress(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            num_experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(256, (num_experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(120, 124, blocks.shape[:3], generator=draw, dtype=torch.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            expanded = zip(blocks, scales, strict=True)
            values[name] = torch.stack([dequantise_mxfp4(b, s, torch.bfloat16).T for b, s in expanded])

    change_tensors(directory, compress)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    return values


@pytest.mark.parametrize(("model_type", "compress"), [("glm_moe_dsa", in_fp8), ("gpt_oss", in_mxfp4)])
def test_compressed_weights_compute_as_their_values_and_stay_in_their_bits(
    model_type: str, compress: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    small, plain = tmp_path / "small", tmp_path / "plain"
    save_tiny(model_type, small)
    shutil.copytree(small, plain)
    values = compress(small)
    change_tensors(plain, lambda tensors: tensors.update({name: v.bfloat16() for name, v in values.items()}))
    assert any("expert" in name for name in values)
    exact = replace(BASE, arithmetic="exact")
    assert plan_model(small, exact).weights_bytes < 0.85 * plan_model(plain, BASE).weights_bytes
    prompts = [[5 + n % 90 for n in range(count)] for count in (30, 4)]
    of_values = TokenEngine(plain, BASE).generate(prompts, GREEDY)
    expected = TokenEngine(small, exact).generate(prompts, GREEDY)
    assert [each.token_ids for each in expected] == [each.token_ids for each in of_values]
    bounded = replace(exact, expert_memory=few_slots(small), expert_store_dir=str(tmp_path / "store"))
    llm = TokenEngine(small, bounded)
    assert llm.generate(prompts, GREEDY) == expected
    llm.close()


class AnsweringTwice(nn.Linear):
    """A gate that transformers derives from a linear layer, and that answers with more than the product."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), None


def test_a_gate_that_answers_with_more_than_its_product_is_tried_by_its_weight() -> None:
    gate = AnsweringTwice(4, 3, bias=False)
    rows = torch.randn(5, 4)
    (found,) = list(_projections(nn.Sequential(gate), 3, 4))
    assert torch.equal(found(rows), torch.nn.functional.linear(rows, gate.weight))
