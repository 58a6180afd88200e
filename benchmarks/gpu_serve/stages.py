"""The stages of a run on a GPU that serves: each checks its part and writes its figures into a table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, cast

from benchmarks.gpu import gpu_state
from benchmarks.gpu_serve.lab import Lab
from benchmarks.gpu_serve.run import Row, Stage
from benchmarks.gpu_serve.service import NAME, ROOT, Service
from launcher.gpus import gpu_names
from moeserve.engine.gpu_check.models import CONFIGS

_PROMPTS = ("The capital of France", "0 1 2 3 4 5 6 7 8 9", "def main():", "Once upon a time there was a")
_PACKAGES = ("torch", "triton", "transformers", "pyzmq", "msgspec", "starlette", "uvicorn", "llguidance", "structlog")
_SCHEMA = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}


def machine(lab: Lab) -> Iterator[Row]:
    """Versions, and what a service needs of the system."""
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "missing"
    yield "Python", platform.python_version()
    yield "cores", str(len(os.sched_getaffinity(0)))
    yield "pidfd_open", str(hasattr(os, "pidfd_open"))
    shm = os.statvfs("/dev/shm")
    yield "/dev/shm", f"{shm.f_bavail * shm.f_frsize / 2**30:.1f} GiB free"
    if not lab.scale.interpret:
        yield "GPU", gpu_state()
        yield "registering 1 GiB of the host", f"{_register_seconds():.2f} s"


def _register_seconds() -> float:
    import torch

    memory, runtime = torch.zeros(2**30, dtype=torch.uint8), cast("Any", torch.cuda).cudart()
    began = time.monotonic()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    seconds = time.monotonic() - began
    runtime.cudaHostUnregister(memory.data_ptr())
    return seconds


def ceilings(lab: Lab) -> Iterator[Row]:
    """The bounds of memory, products and the link to the host."""
    if lab.scale.interpret:
        return
    code = (
        "import torch; from benchmarks.gpu import measure_ceilings, hardware; d = torch.device('cuda')\n"
        "print(hardware(d)); c = measure_ceilings(d)\n"
        "print(f'copy {c.copy / 1e12:.2f} TB/s, sum {c.read / 1e12:.2f} TB/s, products {c.flops / 1e12:.0f} TFLOP/s')\n"
        "h = torch.empty(2**30, dtype=torch.uint8, pin_memory=True); g = torch.empty_like(h, device=d)\n"
        "from moeserve.model.gpu.setup import seconds_on_gpu as s\n"
        "for n, f in (('to the GPU', lambda: g.copy_(h, True)), ('to the host', lambda: h.copy_(g, True))):\n"
        "    f(); print(f'{n} {2**30 / s(f) / 1e9:.1f} GB/s')\n"
    )
    for line in _python(lab, "-c", code).splitlines():
        yield "measured", line


def checks(lab: Lab) -> Iterator[Row]:
    """`moeserve doctor --gpu`. In the interpreter the tests of the check itself stand for it."""
    if not lab.scale.interpret:
        for line in _python(lab, "-m", "launcher.cli", "doctor", "--gpu").splitlines():
            yield "check", line.strip()


def first_light(lab: Lab) -> Iterator[Row]:
    """Requests of all kinds to tiny models: a GPU answers what the CPU does."""
    models = {"tiny": lab.scale.model} if lab.scale.interpret else CONFIGS
    tokens = 2 if lab.scale.interpret else 16
    for name, sizes in models.items():
        yield from _as_on_a_cpu(lab, name, sizes, tokens)


def _as_on_a_cpu(lab: Lab, name: str, sizes: Mapping[str, Any], tokens: int, *settings: str) -> Iterator[Row]:
    """Ask a tiny model on a CPU and on a GPU the same, and compare the answers."""
    limits = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "128")
    config = {**sizes, "vocab_size": 320, "max_position_embeddings": 128}
    told: dict[str, list[Any]] = {}
    for device in ("cpu", "cuda"):
        blocks = ("--block-size", "16", "--kv-cache-memory", "4MiB")
        service = lab.serve(name, config, "--device", device, *limits, *blocks, *settings)
        told[device] = _asked(service, tokens)
        code = service.stop()
        if code:
            raise RuntimeError(f"{device}: exit code {code} after SIGTERM: {service.log_end()}")
    for asked, (of_cpu, of_gpu) in zip(_ASKED, zip(told["cpu"], told["cuda"], strict=True), strict=True):
        if of_cpu != of_gpu:
            raise AssertionError(f"{name}, {asked}: {of_gpu!r} instead of {of_cpu!r}")
        yield f"{name}, {asked}", "as on the CPU"


_ASKED = ("greedy, together", "drawn by a seed", "JSON by a schema", "two choices", "cached tokens", "left stream ends")


def _asked(service: Service, tokens: int) -> list[Any]:
    """Return the answers to requests of each kind of `_ASKED`."""
    together = service.together(list(_PROMPTS), tokens)
    drawn = service.complete(_PROMPTS[0], tokens, temperature=1.0, seed=7)["choices"][0]["text"]
    body = {"model": NAME, "messages": [{"role": "user", "content": "n?"}], "max_tokens": 4 * tokens, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}
    said = service.ask("/v1/chat/completions", {**body, "response_format": form})["choices"][0]["message"]["content"]
    two = [choice["text"] for choice in service.complete(_PROMPTS[1], tokens, n=2, temperature=1.0, seed=3)["choices"]]
    long = " ".join(_PROMPTS)
    service.complete(long, 1)
    cached = service.complete(long, 1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    stream = service.stream(_PROMPTS[2], 64)
    next(stream)
    stream.close()
    if not said.lstrip().startswith("{"):  # A random model may not come to the end of it.
        raise AssertionError(f"{said!r} is not the beginning of an object")
    return [together, drawn, said, two, cached, _falls_idle(service)]


def _falls_idle(service: Service) -> bool:
    """Return whether no request runs any more after some time."""
    for _ in range(600):
        if service.metric("moeserve_requests_running") == 0:
            return True
        time.sleep(0.05)
    return False


def start(lab: Lab) -> Iterator[Row]:
    """The start of a service of the large model."""
    service = lab.large()
    yield "ready after", f"{service.startup_s:.1f} s"
    for line in service.log_end(20_000).splitlines():
        if "seconds" in line or "gpu" in line.lower():
            yield "log", line[-200:]
    if not lab.scale.interpret:
        command = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"]
        yield "memory", subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def load(lab: Lab) -> Iterator[Row]:
    """`moeserve bench serve` at each number of streams, and what the engine says of its steps."""
    service, file = lab.large(), lab.out / "bench.json"
    levels = ",".join(map(str, lab.scale.streams))
    before = {name: service.metric(f"moeserve_{name}_total") for name in _OF_STEPS}
    _python(
        lab,
        *("-m", "launcher.cli", "bench", "serve", "--url", service.url, "--workload", "sweep", "--concurrency", levels),
        *("--output-tokens", str(lab.scale.tokens), "--question-words", "1", "--temperature", "1"),
        *("--json", str(file), "--timeout", "600"),
    )
    for column in json.loads(file.read_text())["medians"]:
        figures = column["medians"]
        shown = ", ".join(f"{name} {figures[name]:.4g}" for name in _OF_BENCH if figures.get(name) is not None)
        yield f"{column['workload']} {column['variant']}", shown
        if figures["errors"]:
            raise AssertionError(f"{figures['errors']} of {figures['requests']} requests failed")
    steps, seconds, waited = (service.metric(f"moeserve_{name}_total") - before[name] for name in _OF_STEPS)
    yield "steps", f"{steps:.0f}, {1000 * seconds / max(1.0, steps):.2f} ms each"
    yield "of it the host waited for the GPU", f"{1000 * waited / max(1.0, steps):.2f} ms"


_OF_STEPS = ("steps", "step_seconds", "device_wait_seconds")
_OF_BENCH = ("tokens_per_s", "ttft_p50", "tpot_p50", "itl_p99")


def prompts(lab: Lab) -> Iterator[Row]:
    """The time to the first token of prompts that are not cached, and of the same ones cached."""
    service = lab.large()
    for length in lab.scale.prompts:
        prompt = [(place * 31 + length) % 250 for place in range(length)]
        cold, cached = (next(service.stream(prompt, 2))[0] for _ in range(2))
        yield f"{length} tokens", f"{cold:.3f} s, {length / cold:.0f} tokens/s; cached {cached:.3f} s"


def crash(lab: Lab) -> Iterator[Row]:
    """Streams that go on after their model process was killed."""
    service = lab.large()
    texts = [f"{_PROMPTS[number % len(_PROMPTS)]} {number}" for number in range(lab.scale.streams[-1])][:16]
    tokens = 5 if lab.scale.interpret else 256
    expected = service.together(texts, tokens)

    def follow(prompt: str) -> tuple[str, float]:
        """Return the whole text, and the longest pause between two events."""
        times, told = [0.0], []
        for seconds, text in service.stream(prompt, tokens):
            times.append(seconds)
            told.append(text)
            if len(told) == 2 and prompt == texts[0]:
                service.kill_worker()
        return "".join(told), max(later - earlier for earlier, later in pairwise(times))

    with ThreadPoolExecutor(len(texts)) as threads:
        found = list(threads.map(follow, texts))
    yield "streams", str(len(found))
    yield "longest pause", f"{max(pause for _, pause in found):.1f} s"
    # In 16 bits a text may go on otherwise where two tokens are as likely: a batch's size chooses the kernels.
    same = sum(text == whole for (text, _), whole in zip(found, expected, strict=True))
    yield "texts as without the crash", f"{same} of {len(found)}"
    if any(not text for text, _ in found):
        raise AssertionError("a stream ended without a text")


def expert_memory(lab: Lab) -> Iterator[Row]:
    """Serve a model with all experts on the GPU, then with half of them, and compare the texts."""
    config = {**lab.scale.model, "num_hidden_layers": lab.scale.memory_layers}
    own = ("--device", "cuda", *lab.scale.settings, "--max-num-seqs", "4")
    half = ("--expert-memory", lab.scale.expert_memory)
    tokens, texts = (3 if lab.scale.interpret else 128), dict[str, str]()
    copied, by_demand = ("--expert-compute", "copy"), ("--expert-prefetch", "off")
    ways = {"all resident": (), "half, no prefetch": (*half, *copied, *by_demand)}
    if not lab.scale.interpret:
        ways["half, gates ask ahead"] = (*half, *copied, "--expert-prefetch", "gate")
        # What the host computes is rounded otherwise: this text may go on otherwise.
        ways["half, shared with the host"] = (*half, *by_demand)
    for name, flags in ways.items():
        service = lab.serve("experts", config, *own, *flags)
        times, told = zip(*service.stream(_PROMPTS[0], tokens), strict=True)
        texts[name] = "".join(told)
        rate = (len(times) - 1) / max(1e-9, times[-1] - times[0])
        stalled = service.metric('moeserve_expert_stall_seconds_total{rank="0"}')
        on_host = service.metric('moeserve_expert_computed_on_host_total{rank="0"}')
        told_of = f"stalls {stalled:.2f} s, {on_host:.0f} experts computed by the host"
        yield name, f"{rate:.1f} tokens/s, start {service.startup_s:.0f} s, {told_of}"
        service.stop()
    same = sum(text == texts["all resident"] for text in texts.values())
    yield "texts as with all resident", f"{same} of {len(texts)}"
    if lab.scale.interpret and len(set(texts.values())) > 1:
        raise AssertionError(f"texts differ: {texts}")


def kv_on_host(lab: Lab) -> Iterator[Row]:
    """Prompts that push each other off the GPU and come back from the host's memory."""
    config = {**lab.scale.model, "num_hidden_layers": lab.scale.memory_layers}
    tier = ("--kv-host-memory", "1MiB" if lab.scale.interpret else "8GiB")
    memory = ("--kv-cache-memory", lab.scale.kv_memory, *(("--max-model-len", "96") if lab.scale.interpret else ()))
    service = lab.serve("experts", config, "--device", "cuda", *lab.scale.settings, *memory, *tier)
    length = 33 if lab.scale.interpret else 4096
    prompt = [place % 250 for place in range(length)]
    cold = service.complete(prompt, 2)["choices"][0]["text"]
    for number in range(1, 4 if lab.scale.interpret else 16):
        service.complete([(place + number) % 250 for place in range(length)], 1)
    answer = service.complete(prompt, 2)
    where = answer["usage"]["cached_tokens_details"]
    yield "cached tokens", ", ".join(f"{tokens} {tier}" for tier, tokens in where.items())
    for way in ("read", "written"):
        name = f'moeserve_kv_host_copied_bytes_total{{direction="{way}"}}'
        yield f"bytes {way}", f"{service.metric(name):.3g}"
    if answer["choices"][0]["text"] != cold:
        raise AssertionError(f"{answer['choices'][0]['text']!r} instead of {cold!r}")
    if not where["host"]:
        raise AssertionError("nothing came back from the host")


def nccl(lab: Lab) -> Iterator[Row]:
    """NCCL with a world of one: collectives, captured in a graph and replayed."""
    if not lab.scale.interpret:
        for line in _python(lab, str(ROOT / "benchmarks" / "gpu_serve" / "world_of_one.py")).splitlines():
            yield "NCCL", line


def several(lab: Lab) -> Iterator[Row]:
    """The ways to share a model over the GPUs of a machine: a tiny one on two, then the large one on all of them."""
    num_gpus = 1 if lab.scale.interpret else len(gpu_names())
    if num_gpus == 1:
        yield "GPUs", "one: nothing to share"
        return
    ways = ("expert", "pipeline", "tensor")
    for way in ways:
        flag = f"--{way}-parallel-size"
        yield from _as_on_a_cpu(lab, f"tiny-{way}", CONFIGS["qwen3_moe"], 16, flag, "2")
    num_ranks = 1 << (num_gpus.bit_length() - 1)
    for way in ways:
        flags = (f"--{way}-parallel-size", str(num_ranks))
        service = lab.serve(f"large-{way}", lab.scale.model, "--device", "cuda", *lab.scale.settings, *flags)
        yield " ".join(flags), f"ready after {service.startup_s:.1f} s"
        for number in lab.scale.streams:
            texts, began = [f"{_PROMPTS[place % len(_PROMPTS)]} {place}" for place in range(number)], time.monotonic()
            service.together(texts, lab.scale.tokens)
            rate = number * lab.scale.tokens / (time.monotonic() - began)
            yield f"{number} requests", f"{rate:.0f} tokens/s, with prompts"
        service.stop()


def _python(lab: Lab, *arguments: str) -> str:
    """Run a child and return what it prints. Raise RuntimeError with what it complains about."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[1:4]}: exit code {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


STAGES = (
    Stage("machine", 5, machine),
    Stage("ceilings", 15, ceilings),
    Stage("checks", 60, checks),
    Stage("first-light", 40, first_light),
    Stage("start", 60, start, keeps=True),
    Stage("load", 60, load, keeps=True),
    Stage("prompts", 15, prompts, keeps=True),
    Stage("crash", 60, crash),
    Stage("expert-memory", 60, expert_memory),
    Stage("kv-on-host", 30, kv_on_host),
    Stage("nccl", 12, nccl),
    Stage("several", 360, several),
)
