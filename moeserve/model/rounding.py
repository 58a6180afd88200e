"""The formats of few bits in which a CPU keeps the weights of a checkpoint, and the arithmetic of their products."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from kernels.cpu.library import native_kernels
from kernels.cpu.quantised import packed_bytes, quantise
from kernels.weight_formats import FORMATS, Q4_0, Q8_0, Arithmetic, Matrix, QuantizedRows, WeightFormat
from moeserve.model.checkpoint import StoredTensor
from moeserve.model.stored import is_in_blocks

_FORMATS = {"none": None, "int8": Q8_0, "int4": Q4_0}
# Matrices that stay as they are: they choose experts or scale a whole block, and are small.
_KEPT = frozenset(("moe_gate", "shared_gate", "conv", "kv_b"))
# Matrices of 8 bits even where others have 4, because all tokens meet in them.
_OUTER = frozenset(("embedding", "lm_head"))
# Matrices of float32 even where others are of bfloat16: they choose experts or scale a whole block, and are small.
_GATES = frozenset(("moe_gate", "shared_gate"))


@dataclass(frozen=True, slots=True)
class Rounding:
    """The format to which matrices outside experts are rounded while they are loaded, and that of experts.

    None keeps the numbers of the checkpoint, in its own bits where `keeps_stored`. arithmetic: of all products with
    quantised weights. stored: the names of the checkpoint's own formats, for people. narrow: matrices that are not
    quantised are kept in bfloat16, and rows are rounded to bfloat16 for their products; gates are not.
    """

    matrices: WeightFormat | None = None
    experts: WeightFormat | None = None
    arithmetic: Arithmetic = "int8"
    keeps_stored: bool = False
    stored: tuple[str, ...] = ()
    narrow: bool = False

    @staticmethod
    def named(quantization: str, expert_quantization: str, arithmetic: str) -> Rounding:
        """Return the rounding for values of `--quantization`, `--expert-quantization` and `--arithmetic`."""
        experts = quantization if expert_quantization == "none" else expert_quantization
        return Rounding(_FORMATS[quantization], _FORMATS[experts], "exact" if arithmetic == "exact" else "int8")

    @property
    def is_none(self) -> bool:
        """True if no matrix is quantised."""
        return self.matrices is None and self.experts is None and not self.keeps_stored

    @property
    def name(self) -> str:
        """The formats, for people: `int8`, or `float32, experts int4`; empty without any."""
        names = {form: name for name, form in _FORMATS.items()}
        if self.is_none:
            return ""
        if self.keeps_stored:
            return " and ".join(self.stored)
        if self.matrices is self.experts:
            return names[self.matrices]
        others = "unquantised" if self.matrices is None else names[self.matrices]
        return f"{others}, experts {names[self.experts]}"

    def format_of(self, key: str, depth: int) -> WeightFormat | None:
        """Return the format of a matrix [N, depth] outside experts, by its key in a plan of weights."""
        if self.matrices is None or key in _KEPT or depth % self.matrices.block:
            return None
        return Q8_0 if key in _OUTER else self.matrices

    def stored_format(self, key: str, stored: StoredTensor) -> WeightFormat | None:
        """Return the format in which a matrix is kept as the checkpoint has it; None for one that is widened."""
        if not self.keeps_stored or key.rpartition(".")[2] in _KEPT:
            return None
        return format_in_file(stored.dtype)

    def narrows(self, key: str) -> bool:
        """Return whether a matrix outside experts is kept in bfloat16 whatever the checkpoint has."""
        return self.narrow and key not in _GATES

    def apply(self, matrix: Tensor, key: str) -> Matrix:
        """Round a matrix [N, K] outside experts."""
        form = self.format_of(key, matrix.shape[1])
        kernels = native_kernels()
        return matrix if form is None or kernels is None else quantise(matrix, form, kernels)

    def num_bytes(self, key: str, stored: StoredTensor) -> int | None:
        """Return the bytes of a quantised matrix outside experts in memory; None where it is kept in its numbers."""
        if len(stored.shape) != 2:
            return None
        own = key.rpartition(".")[2]
        form = self.stored_format(key, stored) or self.format_of(own, stored.shape[1])
        if form is not None:
            return packed_bytes(form, *stored.shape)
        return prod(stored.shape) * (2 if self.narrows(own) else 4) if self.narrow else None


NO_ROUNDING = Rounding()


def format_in_file(dtype: str) -> WeightFormat | None:
    """Return the format of rows that are read in their own bits; kinds of ggml without a format become Q8_0."""
    if not is_in_blocks(dtype):
        return None
    return FORMATS.get(dtype.lower(), Q8_0)


def look_up(table: Matrix, rows: Tensor) -> Tensor:
    """Return rows of an embedding, float32 if the table is quantised."""
    return table.rows(rows).dequantise() if isinstance(table, QuantizedRows) else table[rows]
