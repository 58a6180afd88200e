"""Kernels, model runners, scheduler and the kernels' tests load on a machine that has torch, Triton, numpy,
safetensors, transformers, msgpack and pytest, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "click",
    "deepspeed",
    "gguf",
    "hypothesis",
    "jinja2",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "rich",
    "starlette",
    "structlog",
    "uvicorn",
    "uvloop",
    "zmq",
)


def names_under(folder: str) -> list[str]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name != "__init__.py"]


MODULES = [
    *names_under("kernels"),
    *names_under("moeserve/model/gpu"),
    *names_under("moeserve/tune"),
    "moeserve.engine.gpu_body",
    "moeserve.engine.rank",
    "moeserve.scheduling.steps",
    "moeserve.device",
    "moeserve.plan",
    "moeserve.scheduling.scheduler",
    "moeserve.model.kv_pool",
    "moeserve.model.runner",
    "moeserve.model.weights",
    "moeserve.model.families",
    "experts.moe_layer",
    *names_under("benchmarks/kernels"),
    "benchmarks.steps",
    "benchmarks.decode_steps",
    *names_under("tests/kernels"),
]

ABSENCE = """
import importlib, sys

# Nothing is imported from None, and whoever only looks finds nothing.
sys.modules.update(dict.fromkeys({absent!r}))
"""
IMPORTS = """
for name in {modules!r}:
    importlib.import_module(name)
"""
TUNE = """
import torch
import moeserve.tune.__main__ as tune
from tests.support.tiny_models import save

save("mixtral", {folder!r})
torch.cuda.is_available = lambda: True
tuned = []
tune._tune_attention = lambda spec, block_size, weights, kv: tuned.append(
    (spec.attention.num_heads, block_size, kv)
)
tune._tune_experts = lambda shape, num_tokens, out: tuned.append(shape.name())
assert tune.main([{folder!r}, "--block-size", "32", "--kv-cache-dtype", "fp8_e4m3"]) == 0
assert tuned == [(4, 32, "fp8_e4m3"), "moe-e8-i96-h64-k2-bfloat16"], tuned
assert tune.main(["nobody/nothing"]) == 1
"""


@pytest.mark.slow
def test_what_computes_loads_and_tunes_where_nothing_that_serves_is_installed(tmp_path):
    code = ABSENCE.format(absent=ABSENT) + IMPORTS.format(modules=MODULES) + TUNE.format(folder=str(tmp_path))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    # A model's name needs what serves to become a folder.
    assert "no folder nobody/nothing" in result.stderr
    assert "msgspec" in result.stderr
