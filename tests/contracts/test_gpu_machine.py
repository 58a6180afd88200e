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


@pytest.mark.slow
def test_what_computes_loads_where_nothing_that_serves_is_installed():
    code = ABSENCE.format(absent=ABSENT) + IMPORTS.format(modules=MODULES)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
