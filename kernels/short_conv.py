"""Causal depthwise convolution over the last few tokens, as before delta rules and Mamba: CPU body and reference.

On a CPU a token's result has the same bits in any batch and any chunking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import sigmoid
from kernels.cpu.library import native_kernels
from kernels.state_rows import StateRows


def short_conv(
    x: Tensor, weight: Tensor, states: Tensor, rows: StateRows, bias: Tensor | None = None, *, activates: bool = True
) -> Tensor:
    """Convolve each channel of x [T, C] with weight [W, C], the newest token's last; return [T, C].

    The bias [C] is added before SiLU, which `activates` asks for. states [num_slots, W - 1, C]: the inputs before a
    chunk, zeros before the first token. Mutates the chunks' states, which become the inputs before the next chunk.
    """
    kernels = native_kernels()
    tensors = (x, weight, states) if bias is None else (x, weight, states, bias)
    if kernels is None or x.device.type != "cpu" or any(tensor.dtype != torch.float32 for tensor in tensors):
        return short_conv_reference(x, weight, states, rows, bias, activates=activates)
    out = x.new_empty(x.shape)
    kernels.short_conv(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        weight.shape[0],
        weight.shape[1],
        activates,
        *rows.places_of(states),
        out.data_ptr(),
    )
    return out


def short_conv_reference(
    x: Tensor, weight: Tensor, states: Tensor, rows: StateRows, bias: Tensor | None = None, *, activates: bool = True
) -> Tensor:
    """Compute `short_conv` in plain torch, in fp32 (fp64 for fp64 input)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty_like(x)
    for chunk, slot in rows:
        inputs = torch.cat([states[slot].to(x.dtype), x[chunk]])
        num_rows = chunk.stop - chunk.start
        total = torch.zeros((num_rows, x.shape[1]), dtype=wide, device=x.device)
        if bias is not None:
            total += bias.to(wide)
        for tap, factor in enumerate(weight.to(wide)):
            total += inputs[tap : tap + num_rows].to(wide) * factor
        out[chunk] = total * sigmoid(total) if activates else total
        states[slot] = inputs[num_rows:]
    return out
