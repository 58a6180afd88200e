"""Attention modules of common forms, computed by our kernels from the projections on.

transformers copies the text of a forward from model to model. A module gets our forward if its own has the text of
llama's or qwen3's, and its rotation that of llama's or glm4_moe's. Our forward computes head norms, rotation and
storing in one kernel, without most of the small operations between them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from kernels.linear import Linear, join
from kernels.ops import Ops, StepInputs
from moeserve.model.hf.geometry import LayerMemory
from moeserve.model.hf.modules import Norm, Projection
from moeserve.model.hf.step import RowMask, Step


class FusedAttention:
    """Stands in for the forward of an attention module; calls of other forms go to the module's own forward."""

    def __init__(self, module: Any, memory: LayerMemory, step: Step, ops: Ops, norms: tuple[Norm, Norm] | None) -> None:
        """norms: the norms of query heads and of key heads, None without."""
        self._forward, self._step, self._ops = module.forward, step, ops
        self._project = _together([_product(module, name) for name in ("q_proj", "k_proj", "v_proj")])
        self._out = _product(module, "o_proj")
        self._memory = memory
        self._head_dim, self._scale = module.head_dim, module.scaling
        self._norms = None if norms is None else (norms[0].multiplier, norms[1].multiplier)
        self._eps = 0.0 if norms is None else norms[0].eps

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: RowMask | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, hidden] -> [1, T, hidden]."""
        step = self._step
        if step.running and isinstance(attention_mask, RowMask) and position_embeddings is not None:
            kind, angles = step.kind_of(attention_mask), step.angles_of(position_embeddings)
            if kind.causal and angles is not None:
                return self._attend(hidden_states[0], angles, kind.window)[None], None
        answer: tuple[Tensor, None] = self._forward(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **options,
        )
        return answer

    def _attend(self, rows: Tensor, angles: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        """rows [T, hidden] -> [T, hidden]."""
        step, pools, paged = self._step, self._memory.pools, self._step.paged(self._memory)
        keys, values = step.pools[pools["keys"]], step.pools[pools["values"]]
        qkv = self._project(rows).view(len(rows), -1, self._head_dim)
        q = self._ops.rotate_and_store(
            qkv,
            StepInputs(*angles, paged),
            keys,
            values,
            interleaved=False,
            head_norms=self._norms,
            eps=self._eps,
            clip=None,
        )
        out = self._ops.attend(q, keys, values, paged, scale=self._scale, window=window)
        return self._out(out.view(len(rows), -1))


def fuse(module: Any, memory: LayerMemory, step: Step, ops: Ops) -> FusedAttention | None:
    """Return our forward of an attention module over the pools of its layer, None for a module of another form."""
    form = _form_of(type(module).__module__, type(module).__name__)
    if form is None or memory.pools.keys() != {"keys", "values"}:
        return None
    if form == "plain":
        return FusedAttention(module, memory, step, ops, None)
    first, second = module.q_norm, module.k_norm
    if isinstance(first, Norm) and isinstance(second, Norm) and first.eps == second.eps:
        return FusedAttention(module, memory, step, ops, (first, second))
    return None


def _product(module: Any, name: str) -> Callable[[Tensor], Tensor]:
    """Return the product of a projection of a module, [T, in_features] -> [T, out_features]."""
    projection = getattr(module, name)
    return projection.packed if isinstance(projection, Projection) else projection


def _together(products: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    """Return the results of several products of the same rows side by side."""
    linears = [product for product in products if isinstance(product, Linear)]
    joined = join(linears) if len(linears) == len(products) else None
    return joined or (lambda rows: torch.cat([product(rows) for product in products], 1))


@cache
def _form_of(module_name: str, class_name: str) -> str | None:
    """Return `plain` or `head norms` if modules of this class attend in the way of llama or qwen3, else None."""
    file = sys.modules[module_name]
    rotations = {_text(code.apply_rotary_pos_emb) for code in (modeling_llama, modeling_glm4_moe)}
    if _text(getattr(file, "apply_rotary_pos_emb", None)) not in rotations:
        return None
    if _text(getattr(file, "rotate_half", None)) != _text(modeling_llama.rotate_half):
        return None
    text = _text(getattr(file, class_name).forward)
    if text == _text(modeling_llama.LlamaAttention.forward):
        return "plain"
    return "head norms" if text == _text(modeling_qwen3.Qwen3Attention.forward) else None


def _text(function: Any) -> str:
    """Return a function's text without decorators, comments, annotations, and the window that the mask also has."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError):
        return ""
    assert isinstance(tree, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "sliding_window"]
    names = [argument.arg for argument in tree.args.args]
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return "\n".join([repr(names), *(ast.unparse(statement) for statement in body)])
