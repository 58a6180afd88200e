"""The gated delta rule (https://arxiv.org/abs/2412.06464), token by token: CPU body and reference.

For a value head with the state S [K, V], a query q and a key k of unit length [K], and a value v [V]:

    S <- diag(exp(g)) S;   S <- S + k (beta (v - S^T k))^T;   out = S^T q / sqrt(K)

The gated delta net decays all channels of a key alike, Kimi Delta Attention (https://arxiv.org/abs/2510.26692) each on
its own.

A form for many tokens at once needs fewer operations on a GPU, but its sums depend on the starts of chunks. Token by
token a request has the same bits in any chunking, so a request that resumes from a state goes on as if it had computed
all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import sigmoid
from kernels.cpu.library import NativeKernels, native_kernels
from kernels.cpu.panels import LANES
from kernels.state_rows import StateRows

# Added to the squared length of queries and keys.
UNIT_EPS = 1e-6
# The numbers of a key's channels that the compiled bodies take.
MOST_KEYS = 512


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Each of `num_keys` key heads serves equally many neighbouring value heads.

    decay_rate, step_bias: [num_values] fp32. A token's beta is sigmoid(gate), its g is decay_rate * softplus(gate +
    step_bias). If both are None, gates are beta and g themselves.
    """

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    decay_rate: Tensor | None = None
    step_bias: Tensor | None = None

    @property
    def widths(self) -> list[int]:
        """The numbers of channels of all queries, of all keys and of all values."""
        keys = self.num_keys * self.key_dim
        return [keys, keys, self.num_values * self.value_dim]


def gated_delta_rule(qkv: Tensor, gates: Tensor, heads: DeltaHeads, states: Tensor, rows: StateRows) -> Tensor:
    """Return the outputs [T, HV, V] of the tokens. Mutates the chunks' states.

    qkv [T, 2 HK K + HV V]: queries, then keys, of any length, then values. gates [T, HV + HV D]: the gate of each
    head's beta, then the gates of each head's g, one for all channels of a key (D = 1) or one for each (D = K, without
    `decay_rate`). states [num_slots, HV, K, V] fp32.
    """
    kernels = native_kernels()
    fits = heads.value_dim % LANES == 0 and heads.key_dim <= MOST_KEYS
    if kernels is None or qkv.device.type != "cpu" or qkv.dtype == torch.float64 or not fits:
        return gated_delta_rule_reference(qkv, gates, heads, states, rows)
    return _native_rule(kernels, qkv.float(), gates.float(), heads, states, rows).to(qkv.dtype)


def _native_rule(
    kernels: NativeKernels, qkv: Tensor, gates: Tensor, heads: DeltaHeads, states: Tensor, rows: StateRows
) -> Tensor:
    out = qkv.new_empty((qkv.shape[0], heads.num_values, heads.value_dim))
    kernels.gated_delta_rule(
        qkv.data_ptr(),
        qkv.stride(0),
        gates.data_ptr(),
        gates.stride(0),
        num_decays(gates, heads),
        None if heads.decay_rate is None else heads.decay_rate.data_ptr(),
        None if heads.step_bias is None else heads.step_bias.data_ptr(),
        *rows.places_of(states),
        heads.num_keys,
        heads.num_values,
        heads.key_dim,
        heads.value_dim,
        out.data_ptr(),
    )
    return out


def gated_delta_rule_reference(
    qkv: Tensor, gates: Tensor, heads: DeltaHeads, states: Tensor, rows: StateRows
) -> Tensor:
    """Compute `gated_delta_rule` in plain torch, one token at a time, in fp32 (fp64 for fp64 input)."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    group = heads.num_values // heads.num_keys
    out = qkv.new_empty((qkv.shape[0], heads.num_values, heads.value_dim))
    betas, decays = _betas_and_decays(gates.to(wide), heads)
    for chunk, slot in rows:
        state = states[slot].to(wide)
        for row in range(chunk.start, chunk.stop):
            q, k, v = qkv[row].to(wide).split(heads.widths)
            query, key = (_unit(part.view(heads.num_keys, -1)).repeat_interleave(group, 0) for part in (q, k))
            state = state * decays[row, :, :, None]
            known = (state * key[:, :, None]).sum(1)
            delta = (v.view(heads.num_values, -1) - known) * betas[row, :, None]
            state = state + key[:, :, None] * delta[:, None, :]
            out[row] = (state * (query * heads.key_dim**-0.5)[:, :, None]).sum(1)
        states[slot] = state
    return out


def num_decays(gates: Tensor, heads: DeltaHeads) -> int:
    """Return the number of decays of a head: one, or one for each channel of a key."""
    number = gates.shape[1] // heads.num_values - 1
    assert number == 1 or (number == heads.key_dim and heads.decay_rate is None)
    return number


def _betas_and_decays(gates: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor]:
    """Return betas [T, HV] and decays [T, HV, D]."""
    betas, logs = gates.split([heads.num_values, heads.num_values * num_decays(gates, heads)], 1)
    # Through fp64, as in `sigmoid`: rounded from there, bits do not depend on a token's place.
    wide = logs.double()
    if heads.decay_rate is not None and heads.step_bias is not None:
        betas = sigmoid(betas)
        wide = heads.decay_rate.double() * F.softplus(wide + heads.step_bias.double())
    return betas, wide.exp().to(gates.dtype).unflatten(1, (heads.num_values, -1))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)
