"""The demo over HTTP with weights of 8 and 4 bits: one rank, few experts in memory, two ranks give the same texts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moeserve.model.source import resolve_model
from tests.support.service import Service, service

_PROMPTS = ("The capital of France is", "Explain how bread is baked.\n", "1, 2, 3, 4,", "Ships of the old days")


def texts_of(running: Service) -> list[str]:
    def complete(prompt: str) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = running.http.post("/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(_PROMPTS)) as pool:
        return list(pool.map(complete, _PROMPTS))


def arithmetic_of(running: Service) -> str:
    told: str = running.http.get("/v1/models").json()["data"][0]["arithmetic"]
    return told


@pytest.mark.long
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_demo_has_the_same_texts_however_its_experts_lie(quantization: str, tmp_path: Path) -> None:
    model = Path(resolve_model(None, revision=None, offline=False, progress=lambda *_: None))
    arguments = ("--kv-cache-memory", "128MiB", "--quantization", quantization)
    store = ("--expert-store-dir", str(tmp_path / "store"))
    ways = {
        "one": (),
        "memory": ("--expert-memory", "170MB" if quantization == "int8" else "90MB", *store),
        "ranks": ("--expert-parallel-size", "2"),
    }
    found = {}
    for name, flags in ways.items():
        folder = tmp_path / name
        with service(model, folder, *arguments, *flags) as running:
            rounded = f"weights {quantization}, activations int8 within products"
            assert arithmetic_of(running) == f"float32, keys and values bfloat16, {rounded}"
            found[name] = texts_of(running)
    assert found["memory"] == found["one"]
    assert found["ranks"] == found["one"]
