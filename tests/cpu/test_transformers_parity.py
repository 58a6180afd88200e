"""Models on transformers' code give the numbers of their own forward, and docs/models.md says which do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from moeserve.model.hf.check import choose_ways
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.model.spec import UnsupportedModel
from tests.support.tiny_transformers import moe_types, save_tiny
from tests.support.transformers_parity import DOCUMENT, TOLERANCE, Memory, Row, document, play

# One of each kind: latent attention, shared keys, an indexer, five kinds of states, forms of their own, experts without
# a gate, experts brought to the common form, transformers' experts, a model with vision.
_ALWAYS = (
    "mistral4",
    "gemma4",
    "glm_moe_dsa",
    "qwen3_next",
    "kimi_linear",
    "lfm2_moe",
    "jamba",
    "minimax",
    "deepseek_v4",
    "nemotron_h",
    "dbrx",
    "ernie4_5_vl_moe",
    "muse_spark",
    "qwen3_vl_moe",
)
# The models whose bits are compared every time: windows, an indexer, two forms of states.
_BITS = ("gemma4", "glm_moe_dsa", "kimi_linear", "nemotron_h")
# Their own experts and grouped products multiply by weights in torch; minimax adds up a state once per chunk.
_VARIES = frozenset(
    (
        *("jetmoe", "longcat_flash", "muse_spark"),
        *("deepseek_v4", "inkling2_text", "inkling_mm_model", "minimax"),
    )
)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def check(row: Row) -> None:
    assert not row.refusal
    assert row.worst <= TOLERANCE
    assert str(row) in DOCUMENT.read_text().splitlines(), "run python -m tests.support.transformers_parity"


@pytest.mark.parametrize("model_type", _ALWAYS)
def test_ragged_steps_give_the_logits_of_the_own_forward(model_type: str) -> None:
    check(play(model_type))


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in _BITS else pytest.mark.long) for name in _ALWAYS if name not in _VARIES],
)
def test_transformers_code_gives_logits_the_same_bits_in_any_batch_and_chunking(
    model_type: str, tmp_path: Path
) -> None:
    assert has_same_bits(model_type, tmp_path)


def has_same_bits(model_type: str, folder: Path) -> bool:
    """Return whether a request has the same logits alone in one piece and beside others in several."""
    save_tiny(model_type, folder)
    decoder = load_transformers_decoder(folder, read_transformers_spec(folder))
    decoder.settle(lambda _: None)
    texts = [list(range(3, 46)), list(range(60, 107)), list(range(20, 121, 3))]
    alone = Memory(decoder, texts).step([(0, 0, 43)])[0]
    memory = Memory(decoder, texts)
    for step in ([(1, 0, 47), (0, 0, 8)], [(0, 8, 9), (2, 0, 5)], [(0, 9, 34), (2, 5, 11)], [(2, 11, 12), (0, 34, 42)]):
        memory.step(step)
    return torch.equal(memory.step([(2, 12, 13), (0, 42, 43)])[1], alone)


@pytest.mark.parametrize(
    "model_type", ["falcon_h1", *(pytest.param(name, marks=pytest.mark.long) for name in ("bamba", "olmo_hybrid"))]
)
def test_so_they_do_for_dense_hybrids(model_type: str) -> None:
    row = play(model_type)
    assert not row.refusal
    assert row.worst <= TOLERANCE
    assert "together" in row.mixers


def test_the_document_is_of_the_installed_transformers() -> None:
    assert f"with transformers {transformers.__version__}:" in DOCUMENT.read_text()


@pytest.mark.parametrize("model_type", ["doge", "unlimited_ocr"])
def test_a_type_whose_answers_depend_on_the_batch_or_the_chunks_is_refused_in_words(model_type: str) -> None:
    refusal = play(model_type).refusal
    assert "in several pieces" in refusal


def test_the_check_finds_faults_that_begin_late_in_a_text(tmp_path: Path) -> None:
    # The temperature of its attention grows from 8,192 tokens on; mixers that are called together see wrong positions.
    save_tiny("llama4_text", tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    assert decoder.has_far_limits
    assert str(choose_ways(decoder)) == "mixers apart"
    assert play("llama4_text").worst <= TOLERANCE
    own = decoder._code
    assert own.config.floor_scale == 8192
    assert {module.floor_scale for module in own.body.modules() if hasattr(module, "floor_scale")} == {8192}


def test_the_check_tells_what_goes_wrong(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    states = decoder.states

    def rows_mixed(batch, pools):  # type: ignore[no-untyped-def]
        found = states(batch, pools)
        return found + found.mean(0) * (len(batch.attention.plan.chunks) > 1)

    decoder.states = rows_mixed  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="beside others"):
        choose_ways(decoder)


@pytest.mark.long
def test_every_type_that_is_not_refused_is_at_parity_and_at_least_sixty_are_served() -> None:
    rows = [play(model_type) for model_type in moe_types()]
    assert [row.model_type for row in rows if row.worst > TOLERANCE] == []
    assert sum(not row.refusal for row in rows) >= 60
    assert DOCUMENT.read_text() == document(rows)


@pytest.mark.long
def test_the_types_whose_bits_may_depend_on_the_batch_are_known(tmp_path: Path) -> None:
    refused = {"diffusion_gemma", "doge", "unlimited_ocr"}
    types = [name for name in moe_types() if name not in refused]
    assert {name for name in types if not has_same_bits(name, tmp_path / name)} == _VARIES
