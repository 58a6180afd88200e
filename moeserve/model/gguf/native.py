"""The tensors of a GGUF model that our own code computes, where the `gguf` package's table names them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeserve.model.gguf.config import Fields
from moeserve.model.gguf.modules import ModuleParts
from moeserve.model.gguf.parts import GgufPart
from moeserve.model.spec import CheckpointError

# What a projection of all experts is called in a checkpoint that has one tensor for each.
_STACKED = {"ffn_gate_exps": "gate_proj.weight", "ffn_up_exps": "up_proj.weight", "ffn_down_exps": "down_proj.weight"}


@dataclass(frozen=True, slots=True)
class NeededNames:
    """Names in a checkpoint, without the decoder's prefix.

    others: the names that each tensor outside experts may have. experts: of each layer with experts, the names of the
    tensors that hold gate and up, and down, of all experts.
    """

    others: Sequence[Sequence[str]]
    experts: Sequence[tuple[str, str]]


def native_parts(fields: Fields, needed: NeededNames) -> Iterator[tuple[str, GgufPart]]:
    """Yield the tensors of a decoder by their names in a checkpoint; the file may lack some.

    Raise CheckpointError for a tensor that the decoder does not have.
    """
    parts = ModuleParts(fields, joins_gate_and_up=True)
    for names in needed.others:
        if (found := _found(parts, names)) is not None:
            yield found
    for gate_up, down in needed.experts:
        yield from _experts(parts, f"model.{gate_up}", f"model.{down}")
    parts.check_all_found()


def _found(parts: ModuleParts, names: Sequence[str]) -> tuple[str, GgufPart] | None:
    for name in names:
        whole = name if name.startswith("lm_head.") else f"model.{name}"
        if (part := parts.parameter(whole)) is not None:
            return whole, part
    return None


def _experts(parts: ModuleParts, gate_up: str, down: str) -> Iterator[tuple[str, GgufPart]]:
    """Yield the experts of a layer under the names of one projection each, or of gate and up as one."""
    found = parts.projections(gate_up), parts.projections(down)
    if not all(found):
        raise CheckpointError(f"The GGUF file lacks the experts {gate_up}.")
    is_fused, experts = len(found[0]) == 1, down.rpartition(".")[0]
    for whole, projections in zip((gate_up, down), found, strict=True):
        for own, part in projections.items():
            yield whole if is_fused else f"{experts}.{_STACKED[own.split('.')[2]]}", part
