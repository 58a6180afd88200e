"""What the kernels are to reach, by the names of their cases."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.kernels.measurement import Measurement, table_row
from moeserve.tune.kernel_case import PlannedCase, Section

State = Literal["met", "MISSED", "FAILED", "not measured"]
TABLE_HEADER = ("| target | asked | found | |", "|---|---|---|---|")


@dataclass(frozen=True, slots=True)
class Verdict:
    """found: the figure, empty where there is none."""

    state: State
    found: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """That `figure` of the case is at least `least`: a part of a copy's bytes per second, TFLOP/s, or what the time of
    `peer` is in times of ours."""

    case: str
    figure: Literal["copy", "teraflops", "peer"]
    least: float
    peer: str = ""

    @property
    def asked(self) -> str:
        if self.figure == "peer":
            return f"{self.least:.2f} x {self.peer}"
        return f"{self.least:.0%} of copy" if self.figure == "copy" else f"{self.least:.0f} TFLOP/s"

    def judge(self, found: Measurement | None, copy: float) -> Verdict:
        """copy: bytes per second. found: None of a case that was not measured."""
        if found is None:
            return Verdict("not measured")
        if self.figure == "peer":
            peer = found.peers.get(self.peer)
            return Verdict("not measured") if peer is None else _verdict(peer.ratio, self.least, f"{peer.ratio:.2f} x")
        if self.figure == "copy":
            reached = found.bytes_per_second / copy
            return _verdict(reached, self.least, f"{reached:.1%}")
        reached = found.flops_per_second / 1e12
        return _verdict(reached, self.least, f"{reached:.0f} TFLOP/s")


def _verdict(reached: float, least: float, text: str) -> Verdict:
    return Verdict("met" if reached >= least else "MISSED", text)


def _targets() -> tuple[Target, ...]:
    targets = [
        Target("decode 64 x 4096, 32/4 heads", "copy", 0.85),
        Target("prefill 1 x 16384, 32/4 heads", "teraflops", 400),
        Target("prefill 1 x 16384, 32/4 heads", "peer", 0.65, "SDPA cuDNN"),
    ]
    for model in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
        for num_tokens, least in ((64, 0.85), (256, 0.85), (1, 0.55)):
            targets.append(Target(f"{model} bfloat16, {num_tokens} tokens, uniform", "copy", least))
        targets.append(Target(f"{model} bfloat16, 8192 tokens, uniform, products alone", "teraflops", 350))
        targets.append(Target(f"{model} bfloat16, 8192 tokens, uniform", "peer", 1.0, "grouped_mm"))
    for name in ("RMS norm, 4096 x 2048", "residual and RMS norm, 4096 x 2048"):
        targets.append(Target(name, "copy", 0.75))
    for name in ("norms, rotation, KV write, 4096 tokens", "combine, 4096 tokens"):
        targets.append(Target(name, "copy", 0.75))
    return tuple(targets)


TARGETS = _targets()


def verdict_of(name: str, found: Measurement, copy: float) -> str:
    """Each target of a case and whether it is met."""
    judged = [(target, target.judge(found, copy)) for target in TARGETS if target.case == name]
    return "; ".join(f"{target.asked} {verdict.state}" for target, verdict in judged)


def target_rows(found: Mapping[str, Measurement], copy: float, failed: Collection[str] = ()) -> list[str]:
    """A table of all targets, one row each, by the measurements there are. failed: cases that did not run."""
    rows = []
    for target in TARGETS:
        verdict = Verdict("FAILED") if target.case in failed else target.judge(found.get(target.case), copy)
        rows.append(table_row((target.case, target.asked, verdict.found, verdict.state)))
    return [*TABLE_HEADER, *rows]


def in_order(sections: Sequence[Section]) -> list[PlannedCase]:
    """All cases, those with a target first, in the targets' order."""
    planned = {case.name: case for section in sections for case in section.cases}
    first = {target.case: planned[target.case] for target in TARGETS if target.case in planned}
    return list((first | planned).values())
