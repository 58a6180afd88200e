"""CPU time of mixers with states on transformers' code: its torch bodies against our kernels in their places.

    OMP_NUM_THREADS=1 python -m benchmarks.state_mixers [--tokens 256] [--requests 16] [--rounds 5]

Layers have the sizes of Kimi-Linear-48B-A3B and Nemotron 3 Nano 30B-A3B and random weights. Both forms take turns on
one thread; printed are medians per token and layer, of mixers without their projections, which both have alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from kernels.attention_plan import AttentionPlan
from kernels.ops import CpuOps, PagedRows
from kernels.state_rows import StateRows
from moeserve.model.hf.caches import StateLayer, cache_of, step_cache
from moeserve.model.hf.geometry import Geometry, LayerMemory, NamedState
from moeserve.model.hf.modules import replace_module, replaceable_linears
from moeserve.model.hf.scans import scan
from moeserve.model.hf.step import Step

_WIDTH = 4


def mixers() -> Iterator[tuple[str, nn.Module, int, LayerMemory]]:
    """Yield the name of each mixer, the mixer, the width of its rows, and its states."""
    kimi = KimiLinearConfig(layer_types=["linear_attention"], num_hidden_layers=1)
    heads, dim = kimi.linear_num_heads, kimi.linear_head_dim
    memory = _memory(3 * heads * dim, (heads, dim, dim))
    yield "Kimi Delta Attention", KimiLinearDeltaAttention(kimi, 0), kimi.hidden_size, memory
    nemotron = NemotronHConfig(
        hidden_size=2688,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        layers_block_type=["mamba"],
    )
    mamba = NemotronHMamba2Mixer(nemotron, 0)
    yield "Mamba 2", mamba, nemotron.hidden_size, _memory(mamba.conv_dim, (64, 64, 128))


def _memory(channels: int, state: tuple[int, ...]) -> LayerMemory:
    return LayerMemory(
        states=(NamedState("conv_states.0", (channels, _WIDTH)), NamedState("recurrent_states.0", state))
    )


class _GivenRows(nn.Module):
    """Stands in for a projection: rows that are there already, [B, T, out_features]."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self._out_features = out_features
        self._rows: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        number = x.shape[0] * x.shape[1]
        if number not in self._rows:
            self._rows[number] = torch.randn(number, self._out_features)
        return self._rows[number].view(*x.shape[:2], -1)


def without_products(mixer: nn.Module) -> nn.Module:
    for name, linear in list(replaceable_linears(mixer)):
        replace_module(mixer, name, _GivenRows(linear.out_features))
    return mixer


def theirs(mixer: nn.Module, memory: LayerMemory, x: Tensor) -> Callable[[], object]:
    """Return a step of transformers' own code. x [B, T, hidden]: of prompts that begin, or single tokens behind one."""
    states = {state.name: torch.zeros((len(x), *state.shape)) for state in memory.states}
    return lambda: mixer(x, cache_params=cache_of(Cache, [StateLayer(states, started=x.shape[1] == 1)]))


def ours(mixer: nn.Module, memory: LayerMemory, x: Tensor) -> Callable[[], object]:
    """Return the same step with our kernels, on the rows of all requests at once."""
    step = Step()
    scanned = scan(mixer, 0, memory, step, CpuOps())
    assert scanned is not None
    pools = {state.name: torch.zeros((len(x), *state.shape)) for state in memory.states}
    batch, count = x.shape[:2]
    bounds = torch.arange(0, batch * count + 1, count)
    rows, cache = x.reshape(1, batch * count, -1), step_cache(Geometry((memory,), (), Cache), step)
    nowhere = PagedRows(torch.arange(batch * count), AttentionPlan((), 1))
    step.begin(nowhere, None, (), [pools], StateRows(bounds, torch.arange(batch), count))
    return lambda: scanned(rows, cache_params=cache)


def measure(pair: tuple[Callable[[], object], Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of CPU time of both, which take turns."""
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        for place, run in enumerate(pair):
            start = time.process_time()
            run()
            seconds[place].append(time.process_time() - start)
    return [statistics.median(times[1:]) for times in seconds]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of the prompt")
    parser.add_argument("--requests", type=int, default=16, help="of the step that adds one token to each")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| mixer | step | transformers, ms | moeserve, ms | ratio |\n|---|---|---|---|---|")
    for name, mixer, width, memory in mixers():
        steps = {
            f"a prompt of {options.tokens} tokens": torch.randn(1, options.tokens, width),
            f"one token of {options.requests} requests": torch.randn(options.requests, 1, width),
        }
        without_products(mixer)
        for step, x in steps.items():
            per_token = 1000 / (x.shape[0] * x.shape[1])
            slow, fast = (
                seconds * per_token
                for seconds in measure((theirs(mixer, memory, x), ours(mixer, memory, x)), options.rounds)
            )
            print(f"| {name} | {step} | {slow:.3f} | {fast:.3f} | {slow / fast:.1f} |", flush=True)


if __name__ == "__main__":
    main()
