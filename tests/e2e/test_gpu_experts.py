"""`--device cuda` over HTTP, with less memory than the experts take and with all of it.

Without a GPU the device is a CPU under Triton's interpreter.
`make gpu-test TESTS=tests/e2e/test_gpu_experts.py` runs it on a GPU.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from experts.routing.files import load_trace
from moeserve.model.families import build_spec, load_config
from tests.support.saved_models import saved_model
from tests.support.service import ROOT, Service, children_of, service
from tests.support.slot_bytes import slots_on_gpu
from tests.support.tiny_model import write_model_dir

LIMITS = ("--max-model-len", "32", "--max-num-batched-tokens", "8", "--max-num-seqs", "4", "--block-size", "4")
SMALL = (*LIMITS, "--dtype", "float32", "--kv-cache-memory", "64KiB")
# The last one finds the first one's prefix in the cache.
PROMPTS = [[3, 14, 15, 9, 26, 5], [27, 18], [3, 14, 15, 9, 26, 7]]


def complete_all(running: Service) -> tuple[list[str], int]:
    """The texts, and how many tokens were computed for them."""
    texts, num_computed = [], 0
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = running.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
        usage = answer.json()["usage"]
        num_computed += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] + 2
    return texts, num_computed


def take_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let services that start from now on find a GPU, or the interpreter in its place."""
    import torch

    if not torch.cuda.is_available():
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support/interpreted_gpu:{ROOT}")


@pytest.mark.kernel_change
def test_a_gpu_with_few_slots_says_what_a_cpu_says_and_tells_what_its_gates_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeserve.engine.experts.prefetch import keep_fitted_gates
    from tests.support.fitted_gates import some_gates

    model = tmp_path / "m"
    model.mkdir()
    write_model_dir(model)
    saved_model("qwen3_moe", model)
    spec = build_spec(load_config(model))
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    keep_fitted_gates(model, some_gates(spec))
    with service(model, tmp_path / "cpu", *SMALL) as on_cpu:
        expected, _ = complete_all(on_cpu)
    take_device(monkeypatch)
    size = slots_on_gpu(model, 4)
    bounded = ("--device", "cuda", "--expert-memory", str(size), "--expert-prefetch", "fitted")
    with service(model, tmp_path / "gpu", *SMALL, *bounded) as on_gpu:
        assert on_gpu.http.post("/v1/experts/trace", json={"action": "start"}).json()["status"] == "recording"
        texts, num_computed = complete_all(on_gpu)
        assert texts == expected
        told = on_gpu.http.get("/v1/experts").json()
        assert told["strategy"] == {"eviction": "lfru", "prefetch": {"source": "fitted", "is_on": True}}
        # By default the CPU computes some of the experts that have no slot.
        (compute,) = told["compute"]
        assert compute["ms"].keys() == {"copy", "host_call", "host_expert"}
        assert 0 <= compute["on_host"] <= told["residency"]["misses"][0]
        assert told["recording"]["tokens"] == num_computed
        assert sum(told["load"][0]) == pytest.approx(num_computed * told["top_k"], rel=0.01)
        assert [len(layer) for layer in told["residency"]["resident"][0]] == [4] * len(spec.moe_layers)
        (tmp_path / "trace").write_bytes(on_gpu.http.post("/v1/experts/trace", json={"action": "stop"}).content)
        on_gpu.process.terminate()
        assert on_gpu.end() == 0
    trace = load_trace(tmp_path / "trace")
    assert len(trace.requests) == num_computed
    assert sorted(set(trace.requests.tolist())) == [0, 1, 2]


@pytest.mark.kernel_change
def test_a_service_on_a_gpu_compiles_no_kernels_of_a_cpu_and_goes_on_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiler, called = tmp_path / "m", tmp_path / "g++", tmp_path / "called"
    model.mkdir()
    write_model_dir(model)
    saved_model("qwen3_moe", model)
    compiler.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    take_device(monkeypatch)
    settings = ("--device", "cuda", "--dtype", "bfloat16", "--speculative-config", "none")
    with service(model, tmp_path / "s", *LIMITS, "--kv-cache-memory", "128KiB", *settings) as running:
        stream = running.stream(20, temperature=0, tells_resumed=True)
        found = [next(stream) for _ in range(3)]
        os.kill(children_of(running.process.pid)["worker"], signal.SIGKILL)
        found += list(stream)
        assert found.count({"resumed": True}) == 1
        assert sum("choices" in event for event in found) == 20
        assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert not called.exists()
