"""`--kv-host-memory` and `--kv-disk-path` of a GPU over HTTP: KV comes back with the same tokens.

Without a GPU the device is a CPU under Triton's interpreter.
`make gpu-test TESTS=tests/e2e/test_gpu_kv_host.py` runs it on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_gpu_experts import take_device
from tests.support.saved_models import saved_model
from tests.support.service import Service, service, wait_until
from tests.support.tiny_model import write_model_dir

SIZE = 4
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3]
NOTHING = {"device": 0, "host": 0, "disk": 0}
LIMITS = ("--max-model-len", "32", "--max-num-batched-tokens", "16", "--max-num-seqs", "4", "--block-size", str(SIZE))
# In the interpreter a step may take longer than an engine is usually given for one here.
# Three minutes in the interpreter on cores of its own.
pytestmark = pytest.mark.timeout(900)

PATIENT = ("--engine-timeout", "120")


def small_model(folder: Path, patch: pytest.MonkeyPatch, case: str, **fields: int) -> tuple[Path, tuple[str, ...]]:
    """Write a model to a folder. Return its folder and settings that serve it with 16 blocks of KV."""
    import torch

    from moeserve.model.kv_pool import kv_block_bytes
    from tests.support.checkpoints import spec_of

    model = folder / "m"
    write_model_dir(model)
    saved_model(case, model, **fields)
    memory = 16 * kv_block_bytes(spec_of(model).kv_layers, SIZE, torch.float32)
    patch.setenv("MOESERVE_CACHE", str(folder / "cache"))
    take_device(patch)
    settings = ("--device", "cuda", "--dtype", "float32", "--speculative-config", "none", *LIMITS, *PATIENT)
    return model, (*settings, "--kv-cache-memory", str(memory))


def ask(running: Service, prompt: list[int], **fields: Any) -> tuple[str, dict[str, int]]:
    """Return an answer, and where its cached tokens were."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = running.http.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["text"], found["usage"]["cached_tokens_details"]


# A window of six tokens reaches over two blocks.
@pytest.mark.kernel_change
@pytest.mark.parametrize(("case", "fields"), [("qwen3_moe", {}), ("gpt_oss", {"sliding_window": 6})])
def test_a_prefix_that_left_the_gpu_comes_back_from_the_host_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, fields: dict[str, int]
) -> None:
    model, settings = small_model(tmp_path, monkeypatch, case, **fields)
    with service(model, tmp_path / "s", *settings, "--kv-host-memory", "1MiB") as running:
        cold, where = ask(running, PROMPT)
        assert where == NOTHING
        for first in range(4):
            ask(running, [first, *PROMPT[:-1]], max_tokens=1)
        wait_until(lambda: running.figure('moeserve_kv_tier_blocks{tier="host"}') >= 3)
        assert ask(running, PROMPT, cache_salt="other") == (cold, NOTHING)
        text, where = ask(running, PROMPT)
        assert text == cold
        assert where["host"] > 0
        assert where == NOTHING | {"device": 12 - where["host"], "host": where["host"]}
        assert ask(running, PROMPT) == (cold, NOTHING | {"device": 12})
        wait_until(lambda: running.figure('moeserve_kv_tier_hit_tokens_total{tier="host"}') == where["host"])
        assert running.figure('moeserve_kv_host_copied_bytes_total{direction="read"}') > 0
        assert running.http.get("/v1/cache").json()["host"]["blocks"] > 0
        assert running.http.delete("/v1/cache").status_code == 200
        assert ask(running, PROMPT) == (cold, NOTHING)


@pytest.mark.kernel_change
def test_a_recurrent_state_that_left_the_gpu_comes_back_from_the_host_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from moeserve.model.kv_pool import kv_block_bytes
    from moeserve.model.state_pool import state_row_bytes
    from tests.support.checkpoints import spec_of

    model, prompt = tmp_path / "m", (3 * PROMPT)[:37]  # of much shorter prompts no snapshot is made
    write_model_dir(model)
    saved_model("qwen3_next", model)
    spec = spec_of(model)
    block_bytes = kv_block_bytes(spec.kv_layers, SIZE, torch.float32)
    row_bytes = state_row_bytes(spec.state_layers, torch.float32)
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    take_device(monkeypatch)
    limits = ("--max-model-len", "48", "--max-num-batched-tokens", "48", "--max-num-seqs", "4", "--block-size", "4")
    # Memory has room for three snapshots, and for the KV blocks of all prompts.
    memory = ("--kv-cache-memory", str(7 * row_bytes + 60 * block_bytes), "--state-cache-memory", str(3 * row_bytes))
    settings = ("--device", "cuda", "--dtype", "float32", "--speculative-config", "none", *limits, *PATIENT, *memory)
    with service(model, tmp_path / "s", *settings, "--kv-host-memory", "16MiB") as running:
        cold, where = ask(running, prompt)
        assert where == NOTHING
        for first in range(3):
            ask(running, [first, *prompt[:-1]], max_tokens=1)
        wait_until(lambda: running.figure('moeserve_kv_tier_blocks{tier="host"}') >= 4 * 9)
        assert ask(running, prompt) == (cold, NOTHING | {"host": 36})


@pytest.mark.kernel_change
@pytest.mark.parametrize(("case", "fields"), [("qwen3_moe", {}), ("gpt_oss", {"sliding_window": 6})])
def test_a_prefix_of_a_gpu_comes_back_from_disk_after_a_restart_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, fields: dict[str, int]
) -> None:
    model, settings = small_model(tmp_path, monkeypatch, case, **fields)
    disk = ("--kv-disk-path", str(tmp_path / "kv"))
    with service(model, tmp_path / "s0", *settings, *disk) as running:
        cold, where = ask(running, PROMPT)
        assert where == NOTHING
        wait_until(lambda: running.figure('moeserve_kv_tier_blocks{tier="disk"}') >= 3)
    with service(model, tmp_path / "s1", *settings, *disk) as running:
        assert ask(running, PROMPT, cache_salt="other") == (cold, NOTHING)
        assert ask(running, PROMPT) == (cold, NOTHING | {"disk": 12})
        assert ask(running, PROMPT) == (cold, NOTHING | {"device": 12})


@pytest.mark.kernel_change
def test_a_prefix_comes_from_the_host_while_the_service_lives_and_from_disk_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = small_model(tmp_path, monkeypatch, "qwen3_moe")
    tiers = ("--kv-host-memory", "1MiB", "--kv-disk-path", str(tmp_path / "kv"))

    def push_it_off_the_device(running: Service) -> None:
        for first in range(6):
            ask(running, [first, *PROMPT[:-1]], max_tokens=1)

    with service(model, tmp_path / "s0", *settings, *tiers) as running:
        cold, where = ask(running, PROMPT)
        assert where == NOTHING
        wait_until(lambda: running.figure('moeserve_kv_tier_blocks{tier="disk"}') >= 3)
        push_it_off_the_device(running)
        assert ask(running, PROMPT) == (cold, NOTHING | {"host": 12})
        wait_until(lambda: running.figure('moeserve_kv_tier_hit_tokens_total{tier="host"}') == 12)
        assert running.figure('moeserve_kv_tier_hit_tokens_total{tier="disk"}') == 0
        assert running.figure('moeserve_kv_tier_blocks{tier="host"}') >= 3
        assert 'moeserve_kv_tier_age_seconds{tier="host"}' in running.http.get("/metrics").text
        assert running.http.get("/v1/cache").json()["host"]["blocks"] >= 3
    with service(model, tmp_path / "s1", *settings, *tiers) as running:
        assert ask(running, PROMPT) == (cold, NOTHING | {"disk": 12})
        push_it_off_the_device(running)
        assert ask(running, PROMPT) == (cold, NOTHING | {"host": 12})
        assert running.http.delete("/v1/cache").status_code == 200
        wait_until(lambda: running.http.get("/v1/cache").json()["host"]["blocks"] == 0)
        assert ask(running, PROMPT) == (cold, NOTHING)
