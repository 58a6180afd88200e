"""GGUF models whose tensors the package's table names give the numbers of the models that they were made from, on
transformers' code and on our own, packed too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from benchmarks.token_engine import TokenEngine
from experts.memory.file import round_to_page
from kernels.ops import CpuOps
from kernels.weight_formats import Arithmetic
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.memory_plan import plan_model, read_any_spec, rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.decoder import Decoder
from moeserve.model.expert_store import layouts_in_store
from moeserve.model.gguf.folder import gguf_folder
from moeserve.model.hf.decoder import TransformersDecoder
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.modules import Projection, Table
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.model.spec import CheckpointError, DecoderSpec, UnsupportedModel
from moeserve.model.weights import load_decoder
from moeserve.plan import SamplingParams
from tests.support.gguf_export import Quantise, as_it_is, copy_gguf, in_float32
from tests.support.gguf_modules import ARCHITECTURES, tiny, write_module_gguf
from tests.support.paged_runner import PagedRunner
from tests.support.transformers_parity import TOLERANCE, worst_difference

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
BASE = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=96, max_num_batched_tokens=24, max_num_seqs=4)
PROMPTS = [[3 + 7 * n % 101 for n in range(count)] for count in (30, 4, 9)]
_TEXT = list(range(3, 30))
_PLAIN = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_ALTERNATING = ["sliding_attention", "full_attention"] * 6
# Architectures, and fields of the models of them, that our own code computes.
NATIVE: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4": ("gemma4", {**_PLAIN, "attention_k_eq_v": True, "final_logit_softcapping": 3.0}),
    "gemma4-dense": ("gemma4", {**_PLAIN, "enable_moe_block": False}),
    "gemma4-layer-inputs": ("gemma4", {}),
    "gemma4-many-layers": ("gemma4", {**_PLAIN, "num_hidden_layers": 12, "layer_types": _ALTERNATING}),
    "nemotron_h_moe": ("nemotron_h_moe", {}),
    "nemotron_h_moe-latent": ("nemotron_h_moe", {"moe_latent_size": 32}),
    "nemotron_h_moe-wide-heads": ("nemotron_h_moe", {"head_dim": 32}),
    "glm-dsa": ("glm-dsa", {}),
    "glm-dsa-shared": ("glm-dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
    "granitemoe": ("granitemoe", {}),
    "granitehybrid": ("granitehybrid", {"mamba_n_groups": 2}),
    "granitehybrid-dense": (
        "granitehybrid",
        {"num_local_experts": 0, "intermediate_size": 48, "position_embedding_type": "rope"},
    ),
    "lfm2moe": ("lfm2moe", {}),
}
_PACKED = ("lfm2moe", "granitehybrid", "nemotron_h_moe", "glm-dsa", "afmoe", "dbrx")


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def write(architecture: str, folder: Path, quantise: Quantise = in_float32, **further: object) -> object:
    """Write a tiny model's file; return the model."""
    code = tiny(architecture, **further)
    code.outer.save_pretrained(folder / "saved")
    write_module_gguf(folder / "tiny.gguf", architecture, code, folder / "saved", quantise)
    return code


def load(folder: Path, arithmetic: Arithmetic | None = None) -> TransformersDecoder:
    """Load the file in a folder. arithmetic: None widens all weights."""
    model = gguf_folder(folder / "tiny.gguf", folder / "cache")
    spec = read_transformers_spec(model)
    if arithmetic is None:
        return load_transformers_decoder(model, spec)
    rounding = rounding_of(ServeConfig(arithmetic=arithmetic), spec, read_index(model))
    return load_transformers_decoder(model, spec, ops=CpuOps(arithmetic), rounding=rounding)


def in_kinds(usual: Kind, down: Kind | None = None, attention: Kind | None = None) -> Quantise:
    """Quantise matrices whose rows are whole blocks. down, attention: of such projections, the usual one by default."""

    def quantise(name: str, values: np.ndarray) -> Kind:
        kind = usual if "_down" not in name and "attn" not in name else (down if "_down" in name else attention)
        kind = kind or usual
        fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        return kind if fits and not any(part in name for part in ("gate_inp", "conv1d", "norm")) else Kind.F32

    return quantise


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_model_that_was_written(architecture: str, tmp_path: Path) -> None:
    code = write(architecture, tmp_path)
    decoder = load(tmp_path)
    decoder.settle(lambda _: None)
    assert worst_difference(code, decoder) <= TOLERANCE  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_weights_give_the_logits_of_their_values(architecture: str, tmp_path: Path) -> None:
    write(architecture, tmp_path, in_kinds(Kind.Q4_0, Kind.Q5_1, Kind.Q8_0))
    wide = load(tmp_path)
    packed = load(tmp_path, "exact")
    kept = [module for module in packed._code.outer.modules() if isinstance(module, Projection)]
    assert len(kept) > 8
    text = [range(3, 30)]
    expected, found = (d.logits(next(d.own_states(text))) for d in (wide, packed))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def load_native(folder: Path, arithmetic: Arithmetic | None = None) -> Decoder:
    """Load the file in a folder on our own code. arithmetic: None widens all weights."""
    model = gguf_folder(folder / "tiny.gguf", folder / "cache")
    spec, _ = read_any_spec(model, BASE)
    assert isinstance(spec, DecoderSpec)
    if arithmetic is None:
        return load_decoder(model, spec, max_model_len=64)
    rounding = rounding_of(ServeConfig(arithmetic=arithmetic), spec, read_index(model))
    return load_decoder(model, spec, ops=CpuOps(arithmetic), max_model_len=64, rounding=rounding)


def native_logits(decoder: Decoder) -> torch.Tensor:
    return PagedRunner(decoder, [_TEXT]).step([(0, 0, 5), (0, 5, len(_TEXT))])


@pytest.mark.parametrize("name", NATIVE)
def test_our_own_code_gives_the_logits_of_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    architecture, fields = NATIVE[name]
    code = write(architecture, tmp_path, **fields)
    with torch.no_grad():
        expected = code.outer(torch.tensor([_TEXT]), use_cache=False).logits[0]  # type: ignore[attr-defined]
    assert (native_logits(load_native(tmp_path)) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("types", "tells"),
    [(["full", "shared", "full", "shared"], True), (["full", "full", "full", "shared"], False)],
    ids=["told", "known by its context"],
)
def test_an_indexer_repeated_in_a_layer_that_takes_the_choice_before_it_is_left_out(
    types: list[str], tells: bool, tmp_path: Path
) -> None:
    code = write("glm-dsa", tmp_path, indexer_types=types, max_position_embeddings=2**20)
    (tmp_path / "more").mkdir()

    def repeat(name: str, tensor: gguf.ReaderTensor) -> object:
        own, block = list(as_it_is(name, tensor)), int(name.split(".")[1]) if ".indexer." in name else None
        shared = () if block is None else (n for n in (block + 1,) if types[n : n + 1] == ["shared"])
        return own + [(name.replace(f"blk.{block}.", f"blk.{n}."), *rest) for n in shared for _, *rest in own]

    copy_gguf(
        tmp_path / "tiny.gguf",
        tmp_path / "more" / "tiny.gguf",
        repeat,  # type: ignore[arg-type]
        lambda key: tells or not key.endswith("indexer.types"),
    )
    with torch.no_grad():
        expected = code.outer(torch.tensor([_TEXT]), use_cache=False).logits[0]  # type: ignore[attr-defined]
    assert (native_logits(load_native(tmp_path / "more")) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", NATIVE)
def test_on_our_own_code_packed_weights_give_the_logits_of_their_values(name: str, tmp_path: Path) -> None:
    architecture, fields = NATIVE[name]
    write(architecture, tmp_path, in_kinds(Kind.Q4_0, Kind.Q5_1, Kind.Q8_0), **fields)
    folder = gguf_folder(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert "q4_0" in plan_model(folder, BASE).rounding.stored
    expected, found = (native_logits(load_native(tmp_path, arithmetic)) for arithmetic in (None, "exact"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("architecture", ["lfm2moe", "gemma4", "dbrx"])
def test_tables_and_experts_stay_in_their_blocks(architecture: str, tmp_path: Path) -> None:
    write(architecture, tmp_path, in_kinds(Kind.Q8_0))
    decoder = load(tmp_path, "exact")
    table = decoder._code.body.get_input_embeddings().weight
    assert isinstance(table, Table)
    with pytest.raises(TypeError, match="can only be looked up"):
        table.sum()
    plan = plan_model(gguf_folder(tmp_path / "tiny.gguf", tmp_path / "cache"), BASE)
    assert plan.rounding.stored == ("q8_0",)
    assert plan.weights_bytes < 0.5 * load_bytes(tmp_path)


def load_bytes(folder: Path) -> int:
    wide = replace(BASE, dtype="float16")
    return 2 * plan_model(gguf_folder(folder / "tiny.gguf", folder / "cache"), wide).weights_bytes


def few_slots(folder: Path) -> int:
    spec, dtype = read_any_spec(folder, BASE)
    rounding = rounding_of(BASE, spec, read_index(folder))
    return 3 * len(spec.moe_layers) * round_to_page(layouts_in_store(folder, spec, dtype, rounding).num_bytes)


@pytest.mark.parametrize("architecture", _PACKED)
def test_few_slots_of_packed_experts_change_no_bit(architecture: str, tmp_path: Path) -> None:
    write(architecture, tmp_path, in_kinds(Kind.Q8_0))
    folder = gguf_folder(tmp_path / "tiny.gguf", tmp_path / "cache")
    whole = TokenEngine(folder, BASE)
    expected = [whole.generate(PROMPTS, GREEDY) for _ in range(2)]
    llm = TokenEngine(folder, replace(BASE, expert_memory=few_slots(folder), expert_prefetch="gate"))
    assert llm.experts is not None
    for completions in expected:  # The second time from the prefix cache.
        assert llm.generate(PROMPTS, GREEDY) == completions
    assert llm.experts.stats().counters.num_misses > 10
    llm.close()


def renamed(old: str, new: str) -> Callable[[str, gguf.ReaderTensor], object]:
    def change(name: str, tensor: gguf.ReaderTensor) -> object:
        return [(name.replace(old, new), values, kind) for name, values, kind in as_it_is(name, tensor)]

    return change


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "blk.1.attn_q.weight",
            "blk.1.attn_q.bias",
            "blk.1.attn_q.bias",
        ),
        ("blk.1.ffn_down_exps.weight", "blk.9.ffn_down_exps.weight", "lacks the tensors of .*experts.down_proj"),
    ],
)
def test_tensors_that_do_not_fit_get_one_sentence(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    write("lfm2moe", tmp_path)
    (tmp_path / "bad").mkdir()
    copy_gguf(tmp_path / "tiny.gguf", tmp_path / "bad" / "tiny.gguf", renamed(old, new))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path / "bad")


@pytest.mark.parametrize("architecture", ["afmoe", "mimo2"])
def test_a_field_that_is_absent_has_the_value_of_llama_cpp(architecture: str, tmp_path: Path) -> None:
    write(architecture, tmp_path)
    (tmp_path / "less").mkdir()
    copy_gguf(tmp_path / "tiny.gguf", tmp_path / "less" / "tiny.gguf", as_it_is, lambda key: "weights_norm" not in key)
    if architecture == "mimo2":  # It divides the weights of experts by their sum all the same.
        load(tmp_path / "less")
        return
    with pytest.raises(UnsupportedModel, match="not divided"):
        load(tmp_path / "less")


def test_rows_stay_floats_on_transformers_code(tmp_path: Path) -> None:
    write("afmoe", tmp_path, in_kinds(Kind.Q8_0))
    folder = gguf_folder(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert not plan_model(folder, BASE).rounding.rounds_rows
    with pytest.raises(ConfigError, match="--arithmetic int8 is for models"):
        plan_model(folder, replace(BASE, arithmetic="int8"))
