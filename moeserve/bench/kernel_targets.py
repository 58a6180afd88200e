"""What the kernels are to reach, by the names of their cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.bench.kernel_case import PlannedCase, Section
from moeserve.bench.kernel_measurement import Measurement


@dataclass(frozen=True, slots=True)
class Target:
    """At least these; 0 asks for nothing. of_copy: of a copy's bytes per second. beside: a peer, and the least that
    its time is to be in times of ours."""

    of_copy: float = 0.0
    teraflops: float = 0.0
    beside: tuple[str, float] | None = None

    def verdict(self, found: Measurement, copy: float) -> str:
        """Each part of it and whether it is reached. copy: bytes per second. A peer that is absent is told of."""
        parts = []
        if self.of_copy:
            parts.append(f"{self.of_copy:.0%} of copy {_reached(found.bytes_per_second >= self.of_copy * copy)}")
        if self.teraflops:
            parts.append(f"{self.teraflops:.0f} TFLOP/s {_reached(found.flops_per_second >= self.teraflops * 1e12)}")
        if self.beside is not None:
            peer, least = self.beside
            time = found.peers.get(peer)
            of_peer = "not measured" if time is None else _reached(time >= least * found.microseconds)
            parts.append(f"{least:.2f} x {peer} {of_peer}")
        return "; ".join(parts)


def _reached(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def _targets() -> dict[str, Target]:
    targets = {
        "decode 64 x 4096, 32/4 heads": Target(of_copy=0.85),
        "prefill 1 x 16384, 32/4 heads": Target(teraflops=400, beside=("SDPA cuDNN", 0.65)),
    }
    for model in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
        for num_tokens in (64, 256):
            targets[f"{model} bfloat16, {num_tokens} tokens, uniform"] = Target(of_copy=0.85)
        targets[f"{model} bfloat16, 1 tokens, uniform"] = Target(of_copy=0.55)
        targets[f"{model} bfloat16, 8192 tokens, uniform"] = Target(teraflops=350, beside=("grouped_mm", 1.0))
    for name in ("RMS norm, 4096 x 2048", "residual and RMS norm, 4096 x 2048"):
        targets[name] = Target(of_copy=0.75)
    for name in ("norms, rotation, KV write, 4096 tokens", "combine, 4096 tokens"):
        targets[name] = Target(of_copy=0.75)
    return targets


TARGETS = _targets()


def targets_first(sections: Sequence[Section]) -> list[Section]:
    """The cases that have a target in a section of their own before the others, in the targets' order."""
    planned: dict[str, PlannedCase] = {case.name: case for section in sections for case in section.cases}
    first = Section("Targets", [planned[name] for name in TARGETS if name in planned])
    rest = [Section(each.title, [case for case in each.cases if case.name not in TARGETS]) for each in sections]
    return [first, *rest]
