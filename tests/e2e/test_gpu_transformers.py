"""`--device cuda` over HTTP with a model on transformers' code.

Without a GPU the device is a CPU under Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_gpu_experts import PROMPTS, SMALL, take_device
from tests.support.saved_models import generated, saved_model
from tests.support.service import service
from tests.support.tiny_model import write_model_dir


@pytest.mark.kernel_change
def test_a_service_on_transformers_code_on_a_gpu_writes_what_transformers_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m"
    model.mkdir()
    write_model_dir(model)
    saved_model("qwen3_moe", model)
    expected = generated(model, PROMPTS, 3)
    take_device(monkeypatch)
    asked = {"model": "m", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    theirs = ("--device", "cuda", "--model-impl", "transformers")
    with service(model, tmp_path / "run", *SMALL, *theirs) as running:
        answers = [running.http.post("/v1/completions", json=asked | {"prompt": prompt}).json() for prompt in PROMPTS]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        # The last prompt finds the first one's beginning in the cache.
        assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
