"""llama.cpp as the oracle of what GGUF files mean, in an environment of its own: `make test-oracles`.

Tiny random files of every architecture are given to its server and to our engine: both continue the same prompts, in
float32 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import transformers

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ServeConfig
from moeserve.model.gguf.folder import gguf_folder
from moeserve.plan import SamplingParams
from tests.clients.environments import Client, InstallError, cache_folder, ensure_environment
from tests.support import gguf_export, gguf_modules
from tests.support.routers import program
from tests.support.tiny_models import build

# It installs a package, so only `make test-oracles` runs it.
pytestmark = pytest.mark.long

LLAMA_CPP = Client("llama-cpp", "llama.cpp", "pip", ("xllamacpp==2026.10.11549",), "")
SERVER = Path(__file__).with_name("llama_cpp_server.py")
NUM_PROMPTS, NUM_TOKENS, NUM_LIKELIEST = 12, 6, 5
PROMPTS = [[3 + (7 + 2 * number) * place % 101 for place in range(2 + 5 * number)] for number in range(NUM_PROMPTS)]
CONFIG = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=96, max_num_batched_tokens=24, max_num_seqs=4)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=NUM_LIKELIEST)
# The largest difference of two log probabilities. llama.cpp looks Gemma's activation up in a table of 16-bit numbers.
TOLERANCE, OF_ARCHITECTURE = 2e-4, {"gemma4": 0.05}
# Architectures of which the server computes something else, or nothing.
DEFECTS = {
    "phimoe": "It has an RMS norm for Phi's layer norm, and weighs experts by a softmax for its sparse mixer.",
    "glm-dsa": "It ends by itself.",
}
# Models that differ from those of our own tests: shapes that the server asks for, and what it computes otherwise. It
# rounds the bounds of gpt-oss' YaRN to whole channels, does without the clip of OLMoE's projections, and ranks groups
# of DeepSeek V2's experts by their two best ones.
_DELTA_NETS = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FITTED: dict[str, dict[str, Any]] = {
    "qwen3next": {**_DELTA_NETS, "attention_bias": False},
    "qwen35": _DELTA_NETS,
    "qwen35moe": _DELTA_NETS,
    "olmoe": {"num_key_value_heads": 4, "clip_qkv": None},
    "dots1": {"num_key_value_heads": 4},
    "deepseek2": {"q_lora_rank": 24, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "ernie4_5-moe": {"use_bias": False},
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
# Our own code reads the ones, transformers' the others; an architecture may be among both.
FILES = [
    pytest.param(
        by_modules,
        name,
        id=f"{name} by modules" if by_modules else name,
        marks=pytest.mark.xfail(strict=True, reason=DEFECTS[name]) if name in DEFECTS else (),
    )
    for by_modules, names in ((False, gguf_export.ARCHITECTURES), (True, gguf_modules.ARCHITECTURES))
    for name in names
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Skip all where llama.cpp cannot be installed."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    try:
        ensure_environment(LLAMA_CPP, cache_folder())
    except InstallError as error:
        pytest.skip(f"llama.cpp cannot be installed: {str(error)[-300:]}")


def write(name: str, folder: Path, *, by_modules: bool) -> Path:
    path = folder / "tiny.gguf"
    if not by_modules:
        case, fields = gguf_export.ARCHITECTURES[name]
        gguf_export.write_gguf(path, name, build(case, **{**fields, **FITTED.get(name, {})}))
        return path
    code = gguf_modules.tiny(name)
    code.outer.save_pretrained(folder / "saved")
    gguf_modules.write_module_gguf(path, name, code, folder / "saved")
    return path


def ask(http: httpx2.Client, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """Return each token of llama.cpp's answer with the likeliest ones in its place."""
    asked = {"n_predict": NUM_TOKENS, "n_probs": NUM_LIKELIEST, "temperature": 0, "cache_prompt": False}
    answer = http.post("/completion", json={"prompt": prompt, **asked})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["completion_probabilities"]
    return found


def compare(own: Completion, theirs: list[dict[str, Any]], tolerance: float) -> float:
    """Return the largest difference of a log probability; fail where another token is likelier than by it."""
    worst = 0.0
    for logprobs, place in zip(own.logprobs, theirs, strict=False):
        likeliest = dict(logprobs.top)
        found = {entry["id"]: entry["logprob"] for entry in place["top_logprobs"]}
        worst = max([worst, *(abs(likeliest[token] - found[token]) for token in likeliest.keys() & found.keys())])
        first, second = sorted(likeliest.values(), reverse=True)[:2]
        if place["id"] != logprobs.top[0][0]:
            assert first - second <= 2 * tolerance, (logprobs, place)
            break  # As likely: the texts differ from here on.
    return worst


@pytest.mark.parametrize(("by_modules", "name"), FILES)
def test_likeliest_tokens_are_those_of_llama_cpp(name: str, by_modules: bool, tmp_path: Path) -> None:
    path = write(name, tmp_path, by_modules=by_modules)
    llm = TokenEngine(gguf_folder(path, tmp_path / "cache"), CONFIG)
    own = llm.generate(PROMPTS, GREEDY)
    llm.close()
    command = ("python", str(SERVER), str(path), "{port}")
    tolerance = OF_ARCHITECTURE.get(name, TOLERANCE)
    with program(LLAMA_CPP, tmp_path, *command, path="/health") as http:
        worst = max(compare(one, ask(http, prompt), tolerance) for one, prompt in zip(own, PROMPTS, strict=True))
    print(f"{name}: {worst:.6f}")
    assert worst <= tolerance
