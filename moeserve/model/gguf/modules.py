"""The tensors of a GGUF model under the names of the parameters of transformers' modelling code. Torch-free.

Most names are those of the `gguf` package's own table. An architecture is a row of `ROWS`: what its modules call
otherwise, and which tensors lie in another order or form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map

from moeserve.model.gguf.config import Fields, num_layers
from moeserve.model.gguf.header import GgufTensor
from moeserve.model.gguf.parts import Arrangement, GgufPart, Heads, partner_of
from moeserve.model.spec import CheckpointError

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_LAYER = re.compile(r"(.*\b(?:layers|blocks)\.)(\d+)\.(.+)")
# Ends of the names of parameters, and the tensors of a block that they are: the first alternative that a file has, of
# one tensor, or of several one below the other.
Ends = Mapping[str, tuple[tuple[str, ...], ...]]
_ENDS: Ends = {
    "dt_bias": (("ssm_dt.bias",),),
    "A_log": (("ssm_a",),),
    ".D": (("ssm_d",),),
    "e_score_correction_bias": (("exp_probs_b.bias",), ("exp_probs_b",)),
    "expert_bias": (("exp_probs_b.bias",), ("exp_probs_b",)),
    "kv_b_proj.weight": (("attn_kv_b.weight",), ("attn_k_b.weight", "attn_v_b.weight")),
    "block_sparse_moe.router.weight": (("ffn_gate_inp.weight",),),
    "shared_mlp.input_linear.weight": (
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        ("ffn_gate.weight", "ffn_up.weight"),
    ),
    "shared_mlp.output_linear.weight": (("ffn_down_shexp.weight",), ("ffn_down.weight",)),
    "self_attn.sinks": (("attn_sinks.weight",),),
}
# The projections of all experts of a layer, by the parameter of the module of experts: the first that a file has.
_EXPERTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("ffn_gate_up_exps.weight",), ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    "up_proj": (("ffn_up_exps.weight",),),
    "down_proj": (("ffn_down_exps.weight",),),
}
# Tensors that hold nothing that a model computes with here: old tables of rotary embeddings, further predictions.
_IGNORED = re.compile(r"blk\.\d+\.(nextn\.|attn_rot_embd)")


@dataclass(frozen=True, slots=True)
class Row:
    """The differences of an architecture from the common table.

    replaced: parts of parameters' names and what the table calls them. ends: further `_ENDS`, which go first.
    arrangements: by the beginning of a tensor's name in its block. ignored: tensors that a file may hold beside the
    model's, such as those that its configuration has told already.
    """

    replaced: tuple[tuple[str, str], ...] = ()
    ends: Ends = field(default_factory=dict)
    arrangements: Mapping[str, Arrangement] = field(default_factory=dict)
    ignored: str = ""


_MAMBA: Mapping[str, Arrangement] = {"ssm_a": "logarithm"}
_LATENT: Mapping[str, Arrangement] = {"attn_k_b.": "latent"}
# The decoder of a model that transformers has with its towers alone.
_IN_A_WHOLE = (("model.language_model.", "model."),)
# The configuration holds the factors of rotary frequencies.
_FREQUENCIES = r"rope_freqs\.weight"
_PAIRS: Mapping[str, Arrangement] = {"attn_q.": "pairs", "attn_k.": "pairs"}
ROWS: Mapping[str, Row] = {
    "granitehybrid": Row(arrangements={**_MAMBA, **_PAIRS, "ssm_norm.": "flat"}),
    "lfm2moe": Row(),
    "afmoe": Row(),
    "hunyuan-moe": Row(),
    "nemotron_h_moe": Row(
        replaced=(("model.layers.", "backbone.layers."),), arrangements={**_MAMBA, "ssm_norm.": "flat"}
    ),
    "exaone-moe": Row(),
    "jamba": Row(arrangements=_MAMBA),
    "mimo2": Row(),
    "granitemoe": Row(arrangements=_PAIRS),
    "bailingmoe": Row(arrangements=_PAIRS),
    "deepseek": Row(replaced=_IN_A_WHOLE, arrangements=_PAIRS),
    "deepseek2-ocr": Row(replaced=_IN_A_WHOLE),
    "mistral3": Row(arrangements=_PAIRS),
    "step35": Row(
        replaced=_IN_A_WHOLE,
        arrangements=dict.fromkeys(
            ("output_norm.", "attn_norm.", "ffn_norm.", "attn_q_norm.", "attn_k_norm."), "less_one"
        ),
        ignored=_FREQUENCIES,
    ),
    "llama4": Row(
        arrangements={"ffn_gate_exps.": "stacked_turned", "ffn_down_exps.": "stacked_turned"}, ignored=_FREQUENCIES
    ),
    "dbrx": Row(),
    # Layers that take the choice of an earlier one have no use for an indexer of their own.
    "glm-dsa": Row(arrangements=_LATENT, ignored=r"blk\.\d+\.indexer\.(attn_k|attn_q_b|k_norm|proj)\.(weight|bias)"),
    "mistral4": Row(arrangements=_LATENT),
    "kimi-linear": Row(
        replaced=(("forget_gate.", ""),),
        ends={"conv1d.weight": (("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),)},
        arrangements={**_MAMBA, **_LATENT},
    ),
    "gemma4": Row(
        ends={
            "router.scale": (("ffn_gate_inp.scale",),),
            "router.per_expert_scale": (("ffn_down_exps.scale",),),
            "layer_scalar": (("layer_output_scale.weight",),),
        },
        # The configuration holds the factors of rotary frequencies; layers that attend over the keys of another one
        # have no use for keys of their own.
        ignored=r"rope_freqs\.weight|blk\.\d+\.attn_(k|v|k_norm)\.weight",
    ),
}


class ModuleParts:
    """Finds the tensors of parameters, and remembers which tensors of the file were found."""

    def __init__(self, fields: Fields, *, joins_gate_and_up: bool = False) -> None:
        """joins_gate_and_up: in dense blocks and shared experts too, where transformers' code has two projections."""
        self._joins_gate_and_up = joins_gate_and_up
        self._fields, self._row = fields, ROWS[fields.architecture]
        self._num_layers = num_layers(fields)
        self._table = _table(fields.architecture, self._num_layers)
        self._tensors, self._left = fields.header.tensors, dict.fromkeys(fields.header.tensors)

    def parameter(self, name: str) -> GgufPart | None:
        """Return the tensor of a parameter outside experts; None if the file has none."""
        for names in self._alternatives(name):
            found = [self._tensors[own] for own in names if own in self._tensors]
            if found and len(found) < len(names):
                raise CheckpointError(f"The GGUF file holds a part of {name} alone.")
            if found:
                return self._part(names, found)
        return None

    def projections(self, name: str) -> dict[str, GgufPart]:
        """Return the projections of all experts that are a parameter `layers.N...experts.PARAMETER`, by their names."""
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return {}
        for owns in _EXPERTS.get(name.rpartition(".")[2], ()):
            names = [f"blk.{layer[2]}.{own}" for own in owns]
            if all(own in self._tensors for own in names):
                for own in names:
                    self._left.pop(own, None)
                return {own: GgufPart((self._tensors[own],), partner=partner_of(own, self._tensors)) for own in names}
        return {}

    def computed_experts(self, name: str) -> GgufPart | None:
        """Return a parameter of all experts of a layer that transformers' code computes; None for any other one."""
        projections = self.projections(name)
        if not projections:
            return None
        kind = self._arrangement(next(iter(projections)))
        sources = tuple(source for part in projections.values() for source in part.sources)
        return GgufPart(sources, "stacked" if kind == "plain" else kind)

    def _arrangement(self, name: str) -> Arrangement:
        own = block[2] if (block := _BLOCK.fullmatch(name)) else name
        return next((kind for start, kind in self._row.arrangements.items() if own.startswith(start)), "plain")

    def check_all_found(self) -> None:
        """Raise CheckpointError if the file holds a tensor that no parameter is."""
        for name in self._left:
            block = _BLOCK.fullmatch(name)
            is_further = block is not None and int(block[1]) >= self._num_layers
            is_ignored = _IGNORED.match(name) or (self._row.ignored and re.fullmatch(self._row.ignored, name))
            if not is_further and not is_ignored:
                raise CheckpointError(
                    f"The GGUF file holds {name[:80]}, which models of this architecture do not have."
                )

    def _part(self, names: Iterable[str], tensors: list[GgufTensor]) -> GgufPart:
        for name in names:
            self._left.pop(name, None)
        name = next(iter(names))
        kind = self._arrangement(name)
        partner = partner_of(name, self._tensors) if self._joins_gate_and_up and len(tensors) == 1 else ""
        return GgufPart(tuple(tensors), kind, self._heads(name) if kind == "pairs" else Heads(), partner)

    def _heads(self, name: str) -> Heads:
        heads = self._fields.count("attention.head_count")
        return Heads(heads if ".attn_q." in name else self._fields.count("attention.head_count_kv", heads))

    def _alternatives(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Return the tensors that a parameter may be; see `_ENDS`."""
        layer = _LAYER.fullmatch(name)
        for end, alternatives in (*self._row.ends.items(), *_ENDS.items()):
            if name.endswith(end):
                start = f"blk.{layer[2]}." if layer else ""
                return tuple(tuple(start + own for own in owns) for owns in alternatives)
        for old, new in self._row.replaced:
            name = name.replace(old, new)
        found = self._table.get_name(name, (".weight", ".bias"))
        return () if found is None else ((found,),)


@cache
def _table(architecture: str, num_blocks: int) -> TensorNameMap:
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(arch, num_blocks)
