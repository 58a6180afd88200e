"""`--serve auto`: the best model of the list that fits a machine with the context of an agent."""

from __future__ import annotations

import pytest

from launcher import auto_model
from launcher.auto_model import TOKENS_OF_AGENTS, candidates
from moeserve.config import ServeConfig
from moeserve.machine import Machine


@pytest.mark.parametrize(
    ("gibibytes", "name"),
    [
        (96, "ggml-org/gpt-oss-120b-GGUF:MXFP4"),
        (32, "unsloth/Qwen3-Coder-30B"),
        (16, "ggml-org/gpt-oss-20b"),
        (4, None),
    ],
)
def test_the_best_model_that_fits_is_taken(gibibytes: int, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_model, "_bytes_here", lambda *_: 0)
    machine = Machine("a processor", 8, (), 0, gibibytes * 2**30, 20e9)
    best = next((one for one in candidates(machine, ServeConfig()) if one.fits), None)
    if name is None or best is None:
        assert (name, best) == (None, None)
        return
    assert best.choice.name.startswith(name)
    assert best.choice.kv_tokens is not None
    assert best.choice.kv_tokens >= TOKENS_OF_AGENTS
    said = best.in_words()
    assert "a download of" in said
    assert "tokens of context, at most" in said


def test_a_model_in_the_cache_has_its_true_size_and_is_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_model, "_bytes_here", lambda *_: 2**30)
    (first, *_) = candidates(Machine("a processor", 8, (), 0, 2**35), ServeConfig())
    assert (first.is_here, first.choice.num_bytes) == (True, 2**30)
    assert "1 GiB in the cache" in first.in_words()
