"""Kernels, model runners and scheduler load on a machine that has torch, Triton, numpy, safetensors, transformers,
msgpack and pytest, and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "click",
    "deepspeed",
    "gguf",
    "hypothesis",
    "jinja2",
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
    *names_under("moeserve/cuda"),
    *[name for name in names_under("moeserve/bench") if name.rsplit(".", 1)[1].startswith("kernel_")],
    "moeserve.executor",
    "moeserve.model_runner",
    "moeserve.models.weights",
    "moeserve.models.families",
    "moeserve.models.hf_config",
    "moeserve.sampler",
    "moeserve.scheduler",
    "moeserve.step_loop",
    "experts.moe_layer",
]

CODE = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in {modules!r}:
    importlib.import_module(name)
"""


def test_what_computes_loads_where_nothing_that_serves_is_installed():
    code = CODE.format(absent=ABSENT, modules=MODULES)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
