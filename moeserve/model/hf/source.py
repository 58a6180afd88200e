"""The parameters of a model on transformers' code and the stored tensors that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers.core_model_loading import WeightConverter

from moeserve.model.checkpoint import KEPT_IN_BFLOAT16, StoredTensor
from moeserve.model.stored import TensorInfo

# Dtypes of floats of 8 and 4 bits. Where they do not stay as they are, they are expanded into 16 bits.
EXPANDED = frozenset(("F8_E4M3", "FP8_F32", "FP8_128", "MXFP4"))
_NARROW = KEPT_IN_BFLOAT16 | EXPANDED


@dataclass(slots=True)
class Source:
    """The stored tensors that one conversion reads, by the pattern that names them, in order.

    by_projection: each is one projection of all experts, in our order of rows; there is no converter.
    """

    converter: WeightConverter | None
    tensors: dict[str, list[str]] = field(default_factory=dict)
    by_projection: bool = False

    @property
    def names(self) -> list[str]:
        return [name for names in self.tensors.values() for name in names]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The parameters of a model and the stored tensors that they come from.

    index: of the checkpoint. tensors: its tensors by name; a tensor stored as blocks and scales has the
    name and the shape without compression. shapes: by name, of all parameters and buffers that a checkpoint holds.
    sources: of the parameters and buffers outside experts. expert_sources: of the parameters of experts, whose first
    dimension counts experts. tied: parameters that share the tensor of another parameter.
    """

    index: Mapping[str, TensorInfo]
    tensors: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, ...]]
    sources: Mapping[str, Source]
    expert_sources: Mapping[str, Source]
    tied: Mapping[str, str]

    def is_narrow(self, source: Source) -> bool:
        """Return whether all tensors of `source` are stored in bfloat16 or in fewer bits."""
        return all(self.tensors[name].dtype in _NARROW for name in source.names)

    def num_stored_bytes(self, source: Source) -> int:
        """Return the stored bytes of all tensors that a conversion reads."""
        return sum(self.tensors[name].num_bytes for name in source.names)
