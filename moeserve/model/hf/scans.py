"""Mixers that keep states, in one call for all requests of a step, with our kernels for what tokens do to a state.

transformers reaches fast kernels through functions of other packages (causal_conv1d, fla, mamba_ssm) and brings a body
in torch for each. Here a forward runs as if on a prompt without a past, with our functions in place of theirs; ours
know the step's requests and their states. The mixer's own code still does the computation row by row around them. The
check at load tells whether the numbers are right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.gated_delta_rule import DeltaHeads
from kernels.mamba import MambaHeads
from kernels.ops import Ops
from kernels.state_rows import StateRows
from moeserve.model.hf.geometry import LayerMemory
from moeserve.model.hf.step import Step

_CONVOLUTION, _STATE = "conv_states.0", "recurrent_states.0"


class ScannedMixer:
    """Stands in for the forward of a mixer while a step runs."""

    def __init__(self, module: nn.Module, step: Step, functions: Mapping[str, Callable[..., Any]]) -> None:
        """functions: replacements for global names in its forward."""
        self._step, self._forward = step, module.forward
        self._scan = MethodType(_with_globals(_own_forward(module), functions), module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._scan if self._step.running else self._forward)(*args, **kwargs)


def scan(module: nn.Module, number: int, memory: LayerMemory, step: Step, ops: Ops) -> ScannedMixer | None:
    """Return our forward of a mixer over the states of layer `number`; None if it changes them in another way."""
    ours = _Functions(number, step, ops)
    by_kind: dict[str, dict[str, Callable[..., Any]]] = {
        _CONVOLUTION: {"causal_conv1d_fn": ours.convolve},
        _STATE: {
            "chunk_gated_delta_rule": ours.delta_rule,
            "chunk_kda": ours.delta_rule,
            "mamba_chunk_scan_combined": ours.mamba2,
            "selective_scan_fn": ours.mamba1,
        },
    }
    found: dict[str, Callable[..., Any]] = {}
    forward = _own_forward(module)
    called = {name: _package_function(forward.__globals__.get(name)) for name in forward.__code__.co_names}
    for state in memory.states:
        known = by_kind.get(state.name, {})
        functions = {name: known[function] for name, function in called.items() if function in known}
        if not functions:
            return None
        found.update(functions)
    return ScannedMixer(module, step, found) if found else None


def _own_forward(module: nn.Module) -> FunctionType:
    """Return the forward of a module's class without decorators."""
    forward = inspect.unwrap(type(module).forward)
    assert isinstance(forward, FunctionType)
    return forward


def _package_function(function: Any) -> str | None:
    """Return the name of another package's function for which this one of transformers stands; None without one.

    transformers' decorator keeps the name in a variable.
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or "func_name" not in code.co_freevars:
        return None
    return str(cells[code.co_freevars.index("func_name")].cell_contents)


def _with_globals(function: FunctionType, others: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a copy of a function that sees `others` under their names."""
    merged = {**function.__globals__, **others}
    copy = FunctionType(function.__code__, merged, function.__name__, function.__defaults__, function.__closure__)
    return partial(copy, **(function.__kwdefaults__ or {}))


class _Functions:
    """The functions of other packages, over the rows [1, T, ...] of all requests of a step.

    They take the arguments that these packages take, and change the states of one layer. They raise NotImplementedError
    for cases that they do not know.
    """

    def __init__(self, number: int, step: Step, ops: Ops) -> None:
        self._number, self._step, self._ops = number, step, ops
        # The weight of the convolution and the rates of Mamba 1, as our kernels take them.
        self._weight: Tensor | None = None
        self._rate: Tensor | None = None

    @property
    def _rows(self) -> StateRows:
        assert self._step.state_rows is not None
        return self._step.state_rows

    def _states(self, name: str, *shape: int) -> Tensor:
        """Return the first numbers of each request's state as [num_slots, *shape]."""
        flat = self._step.state_pools[self._number][name].flatten(1)
        return flat[:, : torch.Size(shape).numel()].unflatten(1, shape)

    def convolve(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """hidden_states [1, C, T], weight [C, W], bias [C] -> [1, C, T]."""
        if activation not in (None, "silu", "swish"):
            raise NotImplementedError(f"a convolution with {activation}")
        if self._weight is None:
            self._weight = weight.T.contiguous()
        width, num_channels = self._weight.shape
        states = self._states(_CONVOLUTION, width - 1, num_channels)
        x = _strided_rows(hidden_states[0].T)
        out = self._ops.short_conv(x, self._weight, states, self._rows, bias, activates=activation is not None)
        return out.T[None]

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [1, T, HV, V] and the states.

        query, key [1, T, HK, K], value [1, T, HV, V], g [1, T, HV] or [1, T, HV, K], beta [1, T, HV].
        """
        if not use_qk_l2norm_in_kernel:
            raise NotImplementedError("a delta rule with keys as long as they come")
        heads = DeltaHeads(key.shape[2], value.shape[2], key.shape[3], value.shape[3])
        states = self._states(_STATE, heads.num_values, heads.key_dim, heads.value_dim)
        qkv, gates = _side_by_side(query, key, value), _side_by_side(beta, g)
        out = self._ops.gated_delta_rule(qkv, gates, heads, states, self._rows)
        return out[None], states

    def mamba2(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the outputs [1, T, H, P], and the states if they are asked for.

        hidden_states [1, T, H, P], dt [1, T, H], A, D and dt_bias [H], B, C [1, T, G, N].
        """
        if D is None or dt_bias is None or z is not None or not dt_softplus or A.dim() != 1 or D.dim() != 1:
            raise NotImplementedError("this form of Mamba 2")
        rate, bias, skip = (part.float().contiguous() for part in (A, dt_bias, D))
        (num_heads, head_dim), (num_groups, state_dim) = hidden_states.shape[2:], B.shape[2:]
        heads = MambaHeads(num_heads, num_groups, head_dim, state_dim, rate, bias, skip, dt_limit)
        states = self._states(_STATE, num_heads, state_dim, head_dim)
        xbc = _side_by_side(hidden_states, B, C)
        out = self._ops.mamba2_scan(xbc, _strided_rows(dt[0]), heads, states, self._rows)
        return (out[None], states) if return_final_states else out[None]

    def mamba1(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the outputs [1, C, T], and the states if they are asked for.

        hidden_states, dt, z [1, C, T], A [C, N], B, C [1, N, T], D, delta_bias [C].
        """
        if D is None or delta_bias is None or B.dim() != 3 or not delta_softplus:
            raise NotImplementedError("this form of Mamba 1")
        if self._rate is None:
            self._rate = A.float().T.contiguous()
        states = self._states(_STATE, *self._rate.shape)
        sizes = functional.softplus(dt[0].T.float().contiguous() + delta_bias)
        x, bc = _strided_rows(hidden_states[0].T), torch.cat([B[0].T, C[0].T], 1)
        out = self._ops.mamba1_scan(x, sizes, bc, self._rate, D.float(), states, self._rows).T[None]
        if z is not None:
            out = out * functional.silu(z)
        return (out, states) if return_last_state else out


def _side_by_side(*parts: Tensor) -> Tensor:
    """[1, T, ...] each -> [T, all their channels]."""
    return torch.cat([part[0].flatten(1) for part in parts], 1)


def _strided_rows(rows: Tensor) -> Tensor:
    """Return rows [T, C] whose channels lie side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
