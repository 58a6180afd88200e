"""Gates fitted to text: what they learn, their file, and a service that loads ahead by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.token_engine import TokenEngine
from experts.routing.files import Tap
from experts.routing.gates import FittedGates, FittedGatesError, load_fitted_gates, save_fitted_gates
from launcher.cli import main
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.fit import GateFit, TextReader, fit_gates, pieces
from moeserve.plan import SamplingParams

TEXT = "The harbour wakes before the town does. At half past four the first boats come back. " * 8


def test_what_the_layers_between_add_is_learnt_and_the_rest_left_to_the_plain_gate() -> None:
    generator = torch.Generator().manual_seed(0)
    states, truth = torch.randn(2000, 6, generator=generator), torch.randn(3, 7, generator=generator)
    states[:, 5] = 0  # A direction that the text never shows.
    plain = torch.randn(3, 7, generator=generator)
    scores = states @ truth[:, :-1].T + truth[:, -1]
    fit = GateFit(1)
    for part in (slice(0, 900), slice(900, 2000)):
        fit.add({Tap.SHARED: [states[part]]}, [scores[part], scores[part]])
    fitted = fit.solve({(Tap.SHARED, 0, 1): plain})
    maps = torch.from_numpy(fitted.maps[Tap.SHARED, 1])[0]
    assert fitted.num_tokens == 2000
    near = (maps - truth).abs() < 0.2 * (plain - truth).abs() + 0.05
    assert near[:, [0, 1, 2, 3, 4, 6]].all()
    assert torch.allclose(maps[:, 5], plain[:, 5], atol=1e-4)


def test_the_file_belongs_to_one_model(tmp_path: Path) -> None:
    path = tmp_path / "gates.safetensors"
    maps = np.random.default_rng(0).random((2, 3, 5)).astype(np.float16)
    save_fitted_gates(path, FittedGates({(Tap.EARLY, 1): maps}, 7), "a")
    found = load_fitted_gates(path, "a")
    assert found.num_tokens == 7
    assert np.array_equal(found.maps[Tap.EARLY, 1], maps)
    with pytest.raises(FittedGatesError, match="another model"):
        load_fitted_gates(path, "b")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FittedGatesError, match="torn"):
        load_fitted_gates(path, "a")


def test_a_fit_is_nearer_to_what_gates_say_than_the_plain_gate(model: Path) -> None:
    reader = TextReader(model)
    texts = list(pieces(reader, [TEXT], 500))
    assert sum(map(len, texts)) == min(500, len(reader.encode(TEXT)))
    fitted = fit_gates(reader, texts)
    layers = [layer for layer, _ in reader.decoder.gated_blocks()]
    read = reader.read(texts[0])
    with torch.inference_mode():
        said = layers[1].preview(read.states[Tap.EARLY][1])
        for tap in Tap:
            maps = torch.from_numpy(fitted.maps[tap, 1])[0]
            guessed = read.states[tap][0].float() @ maps[:, :-1].T + maps[:, -1]
            assert (guessed - said).square().mean() < 0.5 * said.var()


@pytest.mark.parametrize("choice", ["fitted", "gate"])
def test_fitted_gates_are_found_and_change_no_answer(
    model: Path, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    config = ServeConfig(kv_cache_memory=2**24, max_model_len=64, threads=1)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
    expected = TokenEngine(model, config)
    prompts = [[5, 6, 7], [8, 9]]
    slots = _slots(model, 3)
    bounded = ServeConfig(
        kv_cache_memory=2**24, max_model_len=64, threads=1, expert_memory=slots, expert_prefetch=choice
    )
    if choice == "fitted":
        with pytest.raises(ConfigError, match="moeserve experts fit"):
            TokenEngine(model, bounded)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    result = CliRunner().invoke(main, ["experts", "fit", str(model), "--text", str(text), "--max-tokens", "300"])
    assert result.exit_code == 0, result.output
    llm = TokenEngine(model, bounded)
    try:
        assert llm.generate(prompts, sampling) == expected.generate(prompts, sampling)
        assert llm.experts is not None
        assert llm.experts.stats().counters.prefetch_bytes > 0
    finally:
        llm.close()
        expected.close()


@pytest.mark.parametrize(("content", "words"), [(b"", "no text to learn from"), (b"caf\xe9", "no text in UTF-8")])
def test_what_cannot_be_learnt_from_is_one_sentence(model: Path, tmp_path: Path, content: bytes, words: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    result = CliRunner().invoke(main, ["experts", "fit", str(model), "--text", str(text)])
    assert result.exit_code == 1
    assert words in result.output


def _slots(model: Path, per_layer: int) -> int:
    from benchmarks.experts.memory import slot_bytes

    return per_layer * 2 * slot_bytes(model)
