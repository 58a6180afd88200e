"""Services whose answers are frozen: `moeserve serve` on two ranks and on the interpreter's GPU, asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.behaviour.cases import DEMO_TEXTS, MODELS, PROMPTS, SAMPLING, SHORT_PROMPTS, VOCAB_SIZE, Record, bits_of
from tests.support.forking import popen

ROOT = Path(__file__).resolve().parents[2]
# Makes a CPU the GPU of the processes that find it there.
INTERPRETED_GPU = ROOT / "tests/support/interpreted_gpu"
_ALWAYS = ("--port", "0", "--served-model-name", "m", "--threads", "1", "--max-logprobs", "1000", "--dtype", "float32")
_SMALL = ("--block-size", "4", "--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--kv-cache-memory", "256KiB")
_RANKS = ("--expert-parallel-size", "2", "--engine-timeout", "60")
_GPU = ("--device", "cuda", "--max-model-len", "32", "--engine-timeout", "60")
# The library whose bits are those of every processor.
KERNELS = {"MOESERVE_CPU_KERNELS": "reproducible"}
_GREEDY = {"temperature": 0}
_DEMO_TOP = 1000
_SECONDS = 240


@contextmanager
def service(folder: Path, model: Sequence[str], *arguments: str, **environment: str) -> Iterator[str]:
    """The address of a service that is ready. Raise RuntimeError with what it said if it ends before that.

    environment: variables that differ from this process's.
    """
    folder.mkdir(parents=True)
    own = {"XDG_RUNTIME_DIR": str(folder), **KERNELS, **environment}
    command = [sys.executable, "-m", "launcher.cli", "serve", *model, *_ALWAYS, *arguments]
    with (folder / "stderr").open("w") as errors:
        process = popen(command, cwd=ROOT, env=os.environ | own, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        address = next(
            (found[1] for line in process.stdout if (found := re.search(r"ready on (http://\S+)", line))), ""
        )
        if not address:
            raise RuntimeError((folder / "stderr").read_text())
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def complete(address: str, prompt: list[int] | str, max_tokens: int, num_top: int, **more: Any) -> Any:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "logprobs": num_top, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error


def record_of(given: Sequence[Any], num_top: int) -> Record:
    """A tiny model's tokens are bytes below 128, so that texts are ids; the demo's are given as texts."""

    def name(text: str) -> int | str:
        return ord(text) if num_top == VOCAB_SIZE else text

    record: Record = {"tokens": [], "bits": [], "cached": []}
    for answer in given:
        logprobs = answer["choices"][0]["logprobs"]
        record["tokens"].append([name(text) for text in logprobs["tokens"]])
        found = [
            # The first token of an echoed prompt has no probability.
            "none" if top is None else bits_of(logprob, [(name(text), value) for text, value in top.items()])
            for logprob, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        ]
        record["bits"].append(" ".join(found))
        record["cached"].append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return record


def answers(
    address: str, prompts: Sequence[list[int] | str], max_tokens: int, num_top: int = VOCAB_SIZE, **more: Any
) -> Record:
    return record_of([complete(address, prompt, max_tokens, num_top, **more) for prompt in prompts], num_top)


def two_ranks(folder: Path, name: str, work: Path) -> dict[str, Record]:
    """Greedy tokens of a cold and of a warm cache, tokens drawn by a seed, and the probabilities of a prompt's own."""
    with service(work, [str(folder / name)], *_SMALL, *_RANKS, "--dispatch", MODELS[name].dispatch) as address:
        return {
            "cold": answers(address, PROMPTS, 3, **_GREEDY),
            "hit": answers(address, PROMPTS[:1], 3, **_GREEDY),
            "sampled": answers(address, PROMPTS[:2], 3, **SAMPLING),
            "prompt": answers(address, PROMPTS[1:2], 1, **_GREEDY, echo=True),
        }


def interpreted_gpu(folder: Path, name: str, work: Path) -> dict[str, Record]:
    """As on two ranks, in a few steps: each takes a second. The second prompt finds the first one's beginning."""
    model = MODELS[name]
    few = ("--expert-memory", str(model.expert_memory), "--expert-prefetch", "gate", "--expert-store-dir", str(work))
    arguments = [*_SMALL, *_GPU, *(few if model.few_slots_on_gpu else ())]
    with service(work, [str(folder / name)], *arguments, PYTHONPATH=f"{INTERPRETED_GPU}:{ROOT}") as address:
        return {
            "prompt": answers(address, SHORT_PROMPTS[:1], 2, **_GREEDY, echo=True),
            "hit": answers(address, SHORT_PROMPTS[1:], 2, **_GREEDY),
            "sampled": answers(address, SHORT_PROMPTS[1:], 4, **SAMPLING),
        }


def demo_on_two_ranks(work: Path) -> dict[str, Record]:
    """As on two ranks, of the likeliest tokens alone."""
    with service(work, [], *_RANKS, "--kv-cache-memory", "64MiB", "--dispatch", "alltoall") as address:
        return {
            "cold": answers(address, DEMO_TEXTS, 8, _DEMO_TOP, **_GREEDY),
            "hit": answers(address, DEMO_TEXTS[-1:], 8, _DEMO_TOP, **_GREEDY),
            "sampled": answers(address, DEMO_TEXTS[:1], 8, _DEMO_TOP, **SAMPLING),
        }
