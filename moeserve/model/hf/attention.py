"""Attention of a ragged step under transformers' attention modules, through its attention interface.

The module has projected and rotated the rows, and their keys and values are already in the KV memory. Our paged kernel
computes attention of the common forms; the module's own function computes any other form, one lane after another.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from kernels.ops import Ops
from moeserve.model.hf.geometry import LayerMemory
from moeserve.model.hf.step import PAGED, RowMask, Step

_ATTRIBUTE = "moeserve_attention"
# torch multiplies fewer rows by other code, with other bits: the last one is repeated.
_LEAST_ROWS = 4


class PagedAttention:
    """Computes the attention of one module over the pools of its layer."""

    def __init__(self, module: nn.Module, memory: LayerMemory, step: Step, ops: Ops) -> None:
        self._module: Any = module
        self._step, self._ops = step, ops
        self._memory = memory
        form = _form_of(type(module).__module__)
        self._has_sinks = form == "sinks"
        self._takes_kernel = form is not None and not hasattr(module, "expand_kv")

    def __call__(self, query: Tensor, key: Tensor, mask: RowMask, scale: float, options: dict[str, Any]) -> Tensor:
        """query [1, H, T, D] -> [1, T, H, Dv]. key: the keys of the step's rows, as a layer's cache returned them."""
        step = self._step
        kind = step.kind_of(mask)
        # A layer may attend over the keys of another layer.
        _, memory = step.written.get(id(key), (key, self._memory))
        keys, values = step.pools[memory.pools["keys"]], memory.pools.get("values")
        is_plain = options.get("position_bias") is None and options.get("softcap") is None
        if not (self._takes_kernel and kind.causal and values is not None and is_plain):
            values_pool = None if values is None else step.pools[values]
            return self._lane_by_lane(query, mask, scale, options, memory, keys, values_pool)
        q = query[0].transpose(0, 1).contiguous()
        sinks: Any = self._module.sinks if self._has_sinks else None
        out = self._ops.attend(
            q,
            keys,
            step.pools[values],
            step.paged(memory),
            scale=scale,
            window=kind.window,
            sinks=None if sinks is None else sinks.to(q.dtype),
        )
        return out[None]

    def _lane_by_lane(
        self,
        query: Tensor,
        mask: RowMask,
        scale: float,
        options: dict[str, Any],
        memory: LayerMemory,
        keys_pool: Tensor,
        values_pool: Tensor | None,
    ) -> Tensor:
        """Call the module's own function on each request's keys and values, gathered from `memory`."""
        eager = _eager_of(type(self._module).__module__)
        parts = []
        for lane in self._step.lanes:
            slots = lane.slots_in(memory)
            keys = keys_pool.index_select(1, slots)[None]
            if values_pool is None:
                values = keys.new_empty((*keys.shape[:-1], 0))
            else:
                values = values_pool.index_select(1, slots)[None]
            if hasattr(self._module, "expand_kv"):
                keys, values = self._module.expand_kv(keys, values)
            own = query[:, :, lane.first : lane.last]
            seen = mask.additive(lane, query.dtype)
            num_rows = own.shape[2]
            if num_rows < _LEAST_ROWS and options.get("position_bias") is None:
                rows = [min(row, num_rows - 1) for row in range(_LEAST_ROWS)]
                own, seen = own[:, :, rows], None if seen is None else seen[..., rows, :]
            parts.append(eager(self._module, own, keys, values, seen, scaling=scale, **options)[0][:, :num_rows])
        return torch.cat(parts, 1)


def attach(module: nn.Module, memory: LayerMemory, step: Step, ops: Ops) -> None:
    """Have the module's attention computed over the pools of its layer in the decoder's steps."""
    setattr(module, _ATTRIBUTE, PagedAttention(module, memory, step, ops))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMask,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface. The pools already hold `key` and `value` of the step's rows."""
    options.pop("dropout", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return getattr(module, _ATTRIBUTE)(query, key, attention_mask, scale, options), None


AttentionInterface.register(PAGED, _attend)


def _eager_of(module_name: str) -> Any:
    return sys.modules[module_name].eager_attention_forward


@cache
def _form_of(module_name: str) -> str | None:
    """Return `plain` or `sinks` if modules of this file attend in the way of llama or gpt-oss, else None.

    gemma's way is llama's unless its scores have a cap (`softcap`).

    transformers copies one function into the file of every model, so the text of the function tells its form.
    """
    text = _text(module_name)
    if text in (_text(modeling_llama.__name__), _text(modeling_gemma2.__name__)):
        return "plain"
    return "sinks" if text == _text(modeling_gpt_oss.__name__) else None


def _text(module_name: str) -> str:
    """Return the body of the file's attention function, without comments and annotations."""
    try:
        function = ast.parse(inspect.getsource(_eager_of(module_name))).body[0]
    except (AttributeError, OSError, SyntaxError):
        return ""
    assert isinstance(function, ast.FunctionDef)
    return "\n".join(ast.unparse(statement) for statement in function.body)
