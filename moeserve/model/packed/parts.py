"""The quantised matrices of a safetensors checkpoint: several tensors each, under one name and one shape. Torch-free.

Every matrix gets the format of `kernels.weight_formats` that holds its values, and that is its dtype from here on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moeserve.model.spec import CheckpointError, QuantizationSpec
from moeserve.model.stored import PackedPart, TensorInfo

Index = Mapping[str, TensorInfo]


def joined_matrices(index: Index, quantization: QuantizationSpec | None) -> dict[str, TensorInfo]:
    """Return an index with one tensor, ``.weight``, for each quantised matrix, and all others.

    Raise CheckpointError for tensors that do not fit together.
    """
    if quantization is None or quantization.kind not in _FINDERS:
        return dict(index)
    endings, find = _FINDERS[quantization.kind]
    joined = {name: info for name, info in index.items() if not name.endswith(endings)}
    for name in index:
        if name.endswith(endings[0]):
            stem = name.removesuffix(endings[0])
            joined[f"{stem}.weight"] = find(_Module(stem, index), quantization)
    return joined


class _Module:
    """The tensors of one projection. Raises CheckpointError for those that are missing or have another form."""

    def __init__(self, stem: str, index: Index) -> None:
        self.stem, self._index = stem, index
        if f"{stem}.weight" in index:
            raise CheckpointError(f"The checkpoint holds {stem}.weight twice, quantised and not.")

    def has(self, role: str) -> bool:
        return f"{self.stem}.{role}" in self._index

    def take(self, role: str, dtypes: tuple[str, ...], dims: int) -> tuple[str, TensorInfo]:
        name = f"{self.stem}.{role}"
        info = self._index.get(name)
        if info is None:
            raise CheckpointError(f"The checkpoint lacks {name}, which belongs to a quantised matrix.")
        if info.dtype not in dtypes:
            raise CheckpointError(f"{name} is stored as {info.dtype}, not as {' or '.join(dtypes)}.")
        if len(info.shape) != dims or 0 in info.shape:
            raise CheckpointError(f"{name} has shape {list(info.shape)}, which it cannot have.")
        return name, info

    def check(self, fits: bool) -> None:
        if not fits:
            raise CheckpointError(f"The tensors of the quantised matrix {self.stem} do not fit each other.")

    def joined(self, dtype: str, shape: tuple[int, int], part: PackedPart) -> TensorInfo:
        """Return the matrix [N, K]. dtype: of the format that holds its values, or of numbers if there is none."""
        num_bytes = sum(info.num_bytes for _, info in part.tensors.values())
        return TensorInfo(next(iter(part.tensors.values()))[1].file, dtype, shape, num_bytes, packed=part)


_FLOATS = ("F16", "BF16", "F32")
_INT4 = {"F16": "INT4_F16", "BF16": "INT4_BF16", "F32": "INT8_F32"}


def _integers(bits: int, scales: TensorInfo, depth: int, group: int) -> str:
    """Return the dtype of integers with scales and zero points: float32 where groups are no blocks of a format."""
    if group % 32 or depth % group:
        return "F32"
    return _INT4[scales.dtype] if bits == 4 else "INT8_ZERO"


def _gptq(module: _Module, quantization: QuantizationSpec) -> TensorInfo:
    codes, zeros = (module.take(role, ("I32",), 2) for role in ("qweight", "qzeros"))
    scales = module.take("scales", _FLOATS, 2)
    tensors = {"codes": codes, "zeros": zeros, "scales": scales}
    (num_words, num_rows), (num_groups, zero_words) = codes[1].shape, zeros[1].shape
    bits = 32 * zero_words // num_rows
    module.check(bits in (4, 8) and zero_words * 32 == num_rows * bits and scales[1].shape == (num_groups, num_rows))
    depth = num_words * 32 // bits
    module.check(num_groups <= depth)
    group = depth // num_groups
    if module.has("g_idx"):
        tensors["groups"] = module.take("g_idx", ("I32",), 1)
        module.check(tensors["groups"][1].shape == (depth,))
    else:
        module.check(depth % num_groups == 0 and (num_groups == 1 or group & group - 1 == 0))
    has_order = quantization.has_order and num_groups > 1 and "groups" in tensors
    part = PackedPart("gptq", tensors, bits, group, quantization.zeros_less_one, has_order)
    return module.joined(_integers(bits, scales[1], depth, group), (num_rows, depth), part)


def _awq(module: _Module, _: QuantizationSpec) -> TensorInfo:
    codes, zeros = (module.take(role, ("I32",), 2) for role in ("qweight", "qzeros"))
    scales = module.take("scales", _FLOATS, 2)
    (depth, num_words), (num_groups, zero_words) = codes[1].shape, zeros[1].shape
    module.check(zero_words == num_words and scales[1].shape == (num_groups, 8 * num_words))
    module.check(depth % num_groups == 0)
    group = depth // num_groups
    part = PackedPart("awq", {"codes": codes, "zeros": zeros, "scales": scales}, 4, group)
    return module.joined(_integers(4, scales[1], depth, group), (8 * num_words, depth), part)


_Finder = Callable[[_Module, QuantizationSpec], TensorInfo]
_WORDS = (".qweight", ".qzeros", ".scales", ".g_idx")
# By kind: the endings of the tensors of a matrix, first of the one that each matrix has, and how to find the others.
_FINDERS: dict[str, tuple[tuple[str, ...], _Finder]] = {"gptq": (_WORDS, _gptq), "awq": (_WORDS, _awq)}
