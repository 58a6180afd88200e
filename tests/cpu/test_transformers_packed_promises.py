"""Promises of models on transformers' code over packed weights: a request gets the same bits in any batch and chunking,
from the cache, after a preemption, with drafts, and with few experts in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.token_engine import Completion, TokenEngine
from kernels.cpu.library import native_kernels
from moeserve.config import ServeConfig
from moeserve.model.gguf.folder import gguf_folder
from tests.support.gguf_export import in_blocks
from tests.support.gguf_modules import tiny, write_module_gguf
from tests.support.llm_prompts import (
    BASE,
    PROMPTS,
    SAMPLINGS,
    assert_same,
    assert_same_alone_together_and_with_few_experts,
    assert_same_cold_and_cached,
    complete_alone,
    in_any_batch,
    small_engine,
)
from tests.support.packed_models import FORMS, ROUNDED, quantise_in, save_wide

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
# Short convolutions; windows in most layers; a shared expert; Mamba; a GGUF file with windows, whose last layer limits
# its activation.
_MODELS = {
    "gptq": "lfm2_moe",
    "awq": "afmoe",
    "compressed-tensors": "hunyuan_v1_moe",
    "fp8": "exaone_moe",
    "mxfp4": "nemotron_h",
    "nvfp4": "exaone_moe",
    "int8": "hunyuan_v1_moe",
    "int4": "lfm2_moe",
    "gguf": "step35",
}
_ALWAYS = ("gptq", "nvfp4", "gguf")
# Forms of models with windows: few of their layers keep all KV, so that less memory is short.
_WINDOWS = ("awq", "fp8", "nvfp4", "gguf")


@dataclass(frozen=True)
class Packed:
    """alone: the answers to each prompt by itself. few_blocks: KV memory in which requests are preempted."""

    folder: Path
    config: ServeConfig
    alone: list[Completion]
    few_blocks: int


@pytest.fixture(
    scope="module",
    params=[pytest.param(form, marks=() if form in _ALWAYS else pytest.mark.long) for form in _MODELS],
)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    form, folder = request.param, tmp_path_factory.mktemp("packed")
    config = replace(BASE, model_impl="auto" if form == "gguf" else "transformers")
    if form == "gguf":
        code = tiny(_MODELS[form])
        code.outer.save_pretrained(folder / "saved")
        write_module_gguf(folder / "tiny.gguf", _MODELS[form], code, folder / "saved", in_blocks)
        folder = gguf_folder(folder / "tiny.gguf", folder / "cache")
    else:
        save_wide(_MODELS[form], folder)
    if form in FORMS:
        quantise_in(form, folder)
    if form in ROUNDED:
        config = replace(config, quantization=form)
    return Packed(folder, config, complete_alone(folder, config=config), 25 if form in _WINDOWS else 40)


@in_any_batch
def test_packed_weights_give_the_same_bits_in_any_batch_and_chunking_cold_and_cached(
    packed: Packed, changes: dict[str, object]
) -> None:
    llm = TokenEngine(packed.folder, replace(packed.config, **changes))  # type: ignore[arg-type]
    assert_same_cold_and_cached(llm, packed.alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100
    llm.close()


def test_requests_preempted_beside_packed_weights_end_with_the_same_bits(packed: Packed) -> None:
    llm = small_engine(
        packed.folder, packed.few_blocks, config=packed.config, max_num_seqs=8, max_num_batched_tokens=16
    )
    assert_same(llm.generate(PROMPTS, SAMPLINGS), packed.alone)
    assert llm.scheduler.counters.preemptions > 0
    llm.scheduler.check_idle()
    llm.close()


def test_drafts_beside_packed_weights_change_no_bit(packed: Packed) -> None:
    llm = TokenEngine(packed.folder, replace(packed.config, speculative_config="suffix", max_num_seqs=30))
    for _ in range(2):  # The second time the answers are known, and become drafts.
        assert_same(llm.generate(PROMPTS, SAMPLINGS), packed.alone)
    assert sum(llm.drafts.counters.accepted) > 0
    llm.close()


@pytest.mark.parametrize("prefetch", ["gate", "affinity"])
def test_few_packed_experts_in_memory_change_no_bit(packed: Packed, prefetch: str, tmp_path: Path) -> None:
    config = replace(packed.config, expert_prefetch=prefetch, max_num_seqs=4)
    stores = [None, tmp_path] if prefetch == "gate" else [None]
    assert_same_alone_together_and_with_few_experts(packed.folder, config, PROMPTS[3], stores)
