"""`--reproducible`: the bits of every CPU, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeserve.config import ConfigError
from moeserve.engine.assemble import arithmetic_of, load_rank
from moeserve.engine.memory_plan import plan_model, read_any_spec, rounding_of
from tests.support.llm_prompts import BASE
from tests.support.tiny_models import save

ROOT = Path(__file__).parents[2]
CONFIG = replace(BASE, reproducible=True)
# Prints the tokens of a prompt, drawn by a seed, and their log probabilities.
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from benchmarks.token_engine import TokenEngine
from moeserve.plan import SamplingParams
from tests.support.llm_prompts import BASE
config = replace(BASE, reproducible=True, dtype=sys.argv[2], max_num_batched_tokens=int(sys.argv[3]), max_num_seqs=1)
sampling = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.9, seed=3, logprobs=20)
[answer] = TokenEngine(Path(sys.argv[1]), config).generate([list(range(3, 60))], sampling)
bits = [[entry.logprob.hex(), *(value.hex() for _, value in entry.top)] for entry in answer.logprobs]
print(json.dumps([answer.token_ids, bits]))
"""


def test_what_torch_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("mixtral", tmp_path)
    spec, _ = read_any_spec(tmp_path, CONFIG)
    assert rounding_of(CONFIG, spec, {}) == rounding_of(BASE, spec, {})
    with pytest.raises(ConfigError, match="float16"):
        rounding_of(replace(CONFIG, dtype="float16"), spec, {})
    save("deepseek_v3-yarn", tmp_path / "narrow")
    narrow, _ = read_any_spec(tmp_path / "narrow", CONFIG)
    with pytest.raises(ConfigError, match="heads are no multiple of 16"):
        rounding_of(CONFIG, narrow, {})
    of_transformers, _ = read_any_spec(tmp_path, replace(CONFIG, model_impl="transformers"))
    with pytest.raises(ConfigError, match="for models on our own code"):
        rounding_of(CONFIG, of_transformers, {})
    monkeypatch.setattr("moeserve.engine.memory_plan.native_kernels_absence", lambda: "There is no compiler.")
    with pytest.raises(ConfigError, match=r"--reproducible needs the compiled kernels. There is no compiler."):
        rounding_of(CONFIG, spec, {})


def test_kernels_with_an_order_of_sums_of_their_own_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("mixtral", tmp_path)
    monkeypatch.setattr("moeserve.engine.assemble.native_kernels", lambda: SimpleNamespace(sums_as_tiles=False))
    with pytest.raises(ConfigError, match="add in an order of their own"):
        load_rank(tmp_path, plan_model(tmp_path, CONFIG), CONFIG, lambda _: None)


def test_the_service_says_that_its_bits_are_those_of_every_cpu(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    said = arithmetic_of(plan_model(tmp_path, CONFIG), CONFIG)
    assert said == "float32, bits of every CPU"
    assert "bits" not in arithmetic_of(plan_model(tmp_path, BASE), BASE)


@pytest.mark.kernel_change
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_bits_of_a_model_are_those_of_a_processor_with_avx2_alone(tmp_path: Path, dtype: str) -> None:
    save("mixtral", tmp_path)
    found = []
    ways = (("reproducible", "default", 256), ("x86-64-v3", "avx2", 16), ("reproducible", "avx512", 7))
    for kernels, torch_code, chunk in ways:
        names = {"MOESERVE_CPU_KERNELS": kernels, "ATEN_CPU_CAPABILITY": torch_code}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), dtype, str(chunk)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | names, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1] == found[2]
