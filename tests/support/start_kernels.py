"""The kernels that a start launches for a GPU that is not there, compiled ahead by two processes.

`python -m tests.support.start_kernels MODEL CAPABILITY PART`, with a name of `tiny_models`, prints how many kernels it
found ("found N"), what compiling ahead told ("told DONE TOTAL") at a first and at a second start, how many a launch
then found in the cache and how many not ("launched HITS MISSES"), and the failures of a kernel that cannot be compiled.
PART: `whole`, or `stage` or `shard`, which the second of two ranks has. It has to run in a process of its own, without
TRITON_INTERPRET.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from triton import knobs
from triton.runtime.driver import driver

from kernels.gpu.compile_ahead import compile_ahead
from moeserve.engine.ranks.partners import RankPartners
from moeserve.engine.ranks.pipe import Pipe
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu.kernels import expert_configs, expert_storage
from moeserve.model.gpu.model import GpuSettings, compute_largest_step, kernels_to_launch
from moeserve.model.spec import DecoderSpec
from moeserve.model.stages import stages_of
from tests.support.caught_launches import AbsentGpu, launches_go_to
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.tiny_models import save

if TYPE_CHECKING:
    from experts.parallel.collectives import Collectives

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
SETTINGS = GpuSettings(16, 4, 64, 64, None, 0.9, enforce_eager=True)


def told(done: int, total: int) -> None:
    print("told", done, total)


def part_of(spec: DecoderSpec, part: str) -> dict[str, Any]:
    """The arguments of `build_gpu_decoder` for a part. Nothing is exchanged: the other rank is not there."""
    second = cast("Collectives", SimpleNamespace(rank=1, num_ranks=2, device=CPU))
    if part == "stage":
        stages = stages_of([1, spec.num_layers - 1])
        return {"border": Pipe(second, stages, spec, DTYPE, max_rows=SETTINGS.max_num_batched_tokens)}
    return {} if part == "whole" else {"partners": RankPartners(second, spec, spec, is_open=False)}


def main(name: str, capability: int, part: str) -> None:
    driver.set_active(AbsentGpu(capability))
    with tempfile.TemporaryDirectory() as folder:
        save(name, Path(folder))
        spec = build_spec(load_config(Path(folder)))
        decoder = build_gpu_decoder(
            Path(folder),
            spec,
            dtype=DTYPE,
            device=CPU,
            max_tokens=SETTINGS.max_num_batched_tokens,
            max_model_len=64,
            **part_of(spec, part),
        )
    configs = expert_configs(spec, expert_storage(spec, DTYPE), CPU)
    kernels = kernels_to_launch(decoder, SETTINGS, configs)
    print("found", len(kernels))
    for _ in ("first start", "second start"):
        assert compile_ahead(kernels, told, 2, (0, 1) if part == "whole" else (1, 2)) == []
    hits: Counter[bool] = Counter()
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.update([cache_hit])

    def compile_it(run: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(kernel, *args, grid=grid, warmup=True, **options)

    with launches_go_to(compile_it, capability):
        compute_largest_step(decoder, SETTINGS)
    print("launched", hits[True], hits[False])
    wrong = json.loads(min(kernels))
    wrong["signature"] = dict.fromkeys(wrong["signature"], "*nonsense")
    print(*compile_ahead([json.dumps(wrong)], lambda *_: None, 2))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
