"""The formats of few bits in which a CPU keeps the weights of a checkpoint, and the arithmetic of their products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.cpu.library import native_kernels, native_kernels_absence
from kernels.cpu.quantised import packed_bytes, quantise
from kernels.weight_formats import (
    FORMATS,
    FP8_FORMATS,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    Arithmetic,
    Matrix,
    QuantizedRows,
    WeightFormat,
)
from moeserve.model.checkpoint import StoredTensor, matrices_of_block
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import TensorInfo, is_in_blocks
from moeserve.settings.weights import parse_quantization

# Matrices that stay as they are: they choose experts or positions or scale a whole block, and are small.
_KEPT = frozenset(("moe_gate", "shared_gate", "conv", "kv_b", "index_weights"))
# Matrices that get the finer format: all tokens meet in the outer ones, errors of down projections add up in the
# residual, and errors of queries and keys grow in the softmax. Rows that are one product have one format.
_FINER = frozenset(("embedding", "lm_head", "down", "latent_up", "q", "k", "v", "q_a", "q_b", "kv_a"))
_FINER |= frozenset(("index_q", "index_k", "layer_embedding", "input_out"))
# Matrices whose inputs are rounded twice, where weights have 8 bits: errors grow in the softmax of attention and of the
# next token.
_FINE_ROWS = frozenset(("lm_head", "q", "k", "v", "q_a", "q_b", "kv_a", "index_q", "index_k"))
# Matrices of float32 even where others are of bfloat16: they choose experts or positions or scale a whole block, and
# are small.
_GATES = frozenset(("moe_gate", "shared_gate", "index_weights"))


@dataclass(frozen=True, slots=True)
class Width:
    """A form of `--quantization`.

    usual, finer: formats in the order of preference. A matrix gets the first whose blocks fill its rows.
    """

    name: str
    usual: tuple[WeightFormat, ...]
    finer: tuple[WeightFormat, ...]

    def format_of(self, key: str, depth: int) -> WeightFormat:
        """Return the format of a matrix [N, depth] by its key in a plan of weights; the last one if no block fits."""
        formats = self.finer if key in _FINER else self.usual
        return next((form for form in formats if depth % form.block == 0), formats[-1])


# The names of the formats that multiply rows of floats in either arithmetic.
FLOATS_OF_8_BITS = frozenset(form.name for form in FP8_FORMATS)
INT8 = Width("int8", (Q8_0,), (Q8_0,))
INT4 = Width("int4", (Q4_K, Q4_1), (Q6_K, Q8_0))
_WIDTHS = {"none": None, INT8.name: INT8, INT4.name: INT4}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The width to which matrices outside experts are rounded while they are loaded, and that of experts.

    None keeps the numbers of the checkpoint, in its own bits where `keeps_stored` and no width is given. arithmetic: of
    all products with quantised weights. stored: the names of the checkpoint's own formats, for people. narrow: matrices
    that are not quantised are kept in bfloat16, gates excepted, and rows are rounded to bfloat16 for their products and
    those with floats of 8 bits. fp8_products: on a GPU, see `kernels.gpu.moe_config.WeightStorage`.
    """

    matrices: Width | None = None
    experts: Width | None = None
    arithmetic: Arithmetic = "int8"
    keeps_stored: bool = False
    stored: tuple[str, ...] = ()
    narrow: bool = False
    fp8_products: bool = False

    @staticmethod
    def named(quantization: str, arithmetic: str) -> Rounding:
        """Return a CPU's rounding for values of `--quantization` and `--arithmetic`."""
        forms = parse_quantization(quantization)
        widths = _WIDTHS[forms.others], _WIDTHS[forms.experts]
        return Rounding(*widths, "exact" if arithmetic == "exact" else "int8")

    @property
    def is_none(self) -> bool:
        """True if no matrix is quantised."""
        return self.matrices is None and self.experts is None and not self.keeps_stored

    @property
    def rounds_rows(self) -> bool:
        """True if there are products of rows that are rounded to int8."""
        rounded = self.matrices is not None or self.experts is not None
        return self.arithmetic == "int8" and (rounded or not FLOATS_OF_8_BITS.issuperset(self.stored))

    @property
    def name(self) -> str:
        """The formats, for people: `int8`, or `float32, experts int4`; empty without any."""
        if self.is_none:
            return ""
        if self.keeps_stored:
            return " and ".join(self.stored) + ("" if self.experts is None else f", experts {self.experts.name}")
        others, experts = ("unquantised" if width is None else width.name for width in (self.matrices, self.experts))
        return others if self.matrices is self.experts else f"{others}, experts {experts}"

    def format_of(self, key: str, depth: int) -> WeightFormat | None:
        """Return the format of a matrix [N, depth] outside experts, by its key in a plan of weights."""
        if self.matrices is None or key in _KEPT:
            return None
        form = self.matrices.format_of(key, depth)
        return form if depth % form.block == 0 else None

    def expert_formats(self, hidden_size: int, width: int) -> tuple[WeightFormat, WeightFormat] | None:
        """Return the formats of gate and up [2 width, hidden_size] and of down [hidden_size, width] of an expert."""
        if self.experts is None:
            return None
        return self.experts.format_of("gate", hidden_size), self.experts.format_of("down", width)

    def stored_format(
        self, key: str, stored: StoredTensor, beside: Mapping[str, StoredTensor] = MappingProxyType({})
    ) -> WeightFormat | None:
        """Return the format in which a matrix is kept as the checkpoint has it; None for one that is widened.

        beside: the tensors of its layer, where it may be one of a dense block on our own code.
        """
        if not self.keeps_stored or _own(key) in _KEPT:
            return None
        return format_in_file(stored.dtype) if self.quantises_block(matrices_of_block(key, beside)) else None

    def quantises_block(self, matrices: Mapping[str, StoredTensor]) -> bool:
        """Return whether the matrices of a dense block are quantised, which all of them are or none is.

        matrices: see `matrices_of_block`.
        """
        forms = [
            format_in_file(stored.dtype) if self.keeps_stored else self.format_of(_own(key), stored.shape[1])
            for key, stored in matrices.items()
        ]
        return None not in forms and len(set(forms[:-1])) < 2  # Gate and up are one matrix.

    def check_cuts(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Raise CheckpointError for columns that are cut within the blocks in which a matrix is kept."""
        for key, stored in tensors.items():
            form = self.stored_format(key, stored, tensors)
            if form is None or stored.cut is None or stored.cut.dim == 0:
                continue
            if stored.has_order or stored.shape[1] % form.block:
                raise CheckpointError(
                    f"{stored.name} cannot be shared by --tensor-parallel-size: each rank's columns have to be whole "
                    f"blocks of {form.block} in the order of the file."
                )

    def narrows(self, key: str) -> bool:
        """Return whether a matrix outside experts is kept in bfloat16 whatever the checkpoint has."""
        return self.narrow and key not in _GATES

    def check(self, dtype: torch.dtype) -> None:
        """Raise CheckpointError if matrices that compute in `dtype` are to be rounded and cannot be here."""
        if self.matrices is None and self.experts is None:
            return
        # Asked for only now: a GPU's service would compile the kernels for nothing.
        absence = native_kernels_absence()
        if absence is not None:
            raise CheckpointError(f"Quantised weights need the compiled kernels. {absence}")
        if dtype != torch.float32:
            raise CheckpointError(f"Quantised weights compute in float32, not in {str(dtype).removeprefix('torch.')}.")

    def apply(self, matrix: Tensor, key: str) -> Matrix:
        """Round a matrix [N, K] outside experts; see `check`."""
        form = self.format_of(key, matrix.shape[1])
        if form is None:
            return matrix
        kernels = native_kernels()
        assert kernels is not None
        return quantise(matrix, form, kernels)

    def num_bytes(
        self, key: str, stored: StoredTensor, beside: Mapping[str, StoredTensor] = MappingProxyType({})
    ) -> int | None:
        """Return the bytes of a quantised matrix outside experts in memory; None where it is kept in its numbers.

        beside: as in `stored_format`.
        """
        if len(stored.shape) != 2:
            return None
        own = _own(key)
        form = self.stored_format(key, stored, beside)
        if self.matrices is not None and self.quantises_block(matrices_of_block(key, beside)):
            form = self.format_of(own, stored.shape[1])
        if form is not None:
            return packed_bytes(form, *stored.shape)
        return prod(stored.shape) * (2 if self.narrows(own) else 4) if self.narrow else None


NO_ROUNDING = Rounding()


def _own(key: str) -> str:
    """Return the name of a matrix without that of its block."""
    return key.rpartition(".")[2]


def format_in_file(dtype: str) -> WeightFormat | None:
    """Return the format of rows that are read in their own bits; other kinds of ggml are rounded to Q8_0."""
    if not is_in_blocks(dtype):
        return None
    return FORMATS.get(dtype.lower(), Q8_0)


def lies_in_blocks(info: TensorInfo) -> bool:
    """Return whether a tensor lies in a GGUF file in blocks that are kept as they are."""
    return info.gguf is not None and info.dtype.lower() in FORMATS


def shown_format(dtype: str, form: WeightFormat) -> str:
    """Return the format of a stored matrix, for people, with the kind that was rounded to it if that is another one."""
    return form.name if form.name == dtype.lower() else f"{form.name} (rounded from {dtype})"


def fine(matrix: Matrix, key: str) -> Matrix:
    """Return a matrix outside experts with what its key says about the rows that it multiplies."""
    return matrix.fine() if isinstance(matrix, QuantizedRows) and key in _FINE_ROWS else matrix


def has_fine_experts(layer: int, num_layers: int) -> bool:
    """Return whether the inputs of a layer's experts are rounded twice, where weights have 8 bits: errors of the first
    layer pass through all others, errors of the last one directly affect the choice of the next token."""
    return layer in (0, num_layers - 1)
