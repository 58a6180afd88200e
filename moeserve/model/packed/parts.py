"""The quantised matrices of a safetensors checkpoint: several tensors each, under one name and one shape. Torch-free.

Every matrix gets the format of `kernels.weight_formats` that holds its values, and that is its dtype from here on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from moeserve.model.spec import CheckpointError, QuantizationSpec
from moeserve.model.stored import PackedPart, TensorInfo

Index = Mapping[str, TensorInfo]


def joined_matrices(index: Index, quantization: QuantizationSpec | None) -> dict[str, TensorInfo]:
    """Return an index with one tensor, ``.weight``, for each quantised matrix, and all others.

    Raise CheckpointError for tensors that do not fit together.
    """
    if quantization is not None and quantization.kind == "fp8" and not quantization.form:
        return _joined_fp8(index, quantization.block)
    if quantization is None or quantization.kind not in _FINDERS:
        return dict(index)
    ends, others, find = _FINDERS[quantization.kind]
    joined = {name: info for name, info in index.items() if not name.endswith((*ends, *others))}
    for name in index:
        if name.endswith(ends):
            module = _Module(name.rpartition(".")[0], index)
            found = find(module, quantization)
            if not any(stored == f"{module.stem}.weight" for stored, _ in _packed(found).tensors.values()):
                module.check_alone()
            joined[f"{module.stem}.weight"] = found
    return joined


_FP8_SCALES = "_scale_inv"  # The end of the name of the scales of blocks in DeepSeek's form of FP8.


def _joined_fp8(index: Index, block: tuple[int, int]) -> dict[str, TensorInfo]:
    """Join matrices [..., N, K] in FP8 with the scales of their blocks, [..., ceil(N / rows), ceil(K / columns)].

    block: rows and columns. Matrices without scales stay alone.
    """
    joined = dict(index)
    for name, codes in index.items():
        scales = index.get(name + _FP8_SCALES)
        if codes.dtype != "F8_E4M3" or scales is None:
            continue
        *leading, rows, columns = (1, *codes.shape)
        wanted = tuple(size for size in (*leading, -(-rows // block[0]), -(-columns // block[1])) if size != 1)
        if len(codes.shape) < 2 or tuple(size for size in scales.shape if size != 1) != wanted:
            raise CheckpointError(
                f"{name}{_FP8_SCALES} has shape {list(scales.shape)}, but the configuration says {list(wanted)}."
            )
        if scales.dtype not in (*_FLOATS, "F8_E8M0"):
            raise CheckpointError(f"{name}{_FP8_SCALES} is stored as {scales.dtype}, which are no scales.")
        tensors = {"codes": (name, codes), "scales": (name + _FP8_SCALES, scales)}
        part = PackedPart("fp8", tensors, 8, block[1], rows=block[0])
        form, num_bytes = fp8_dtype(columns, block[1]), codes.num_bytes + scales.num_bytes
        joined[name] = replace(codes, dtype=form, num_bytes=num_bytes, packed=part)
        del joined[name + _FP8_SCALES]
    return joined


def fp8_dtype(depth: int, group: int) -> str:
    """Return the dtype of rows of FP8 with one scale for `group` weights: float32 where no format holds them."""
    if depth % 32 or group % 32:
        return "F32"
    return "FP8_F32" if depth % 128 or group % 128 else "FP8_128"


def _packed(info: TensorInfo) -> PackedPart:
    assert info.packed is not None
    return info.packed


class _Module:
    """The tensors of one projection. Raises CheckpointError for a tensor that is missing or has another form."""

    def __init__(self, stem: str, index: Index) -> None:
        self.stem, self._index = stem, index

    def check_alone(self) -> None:
        """Raise CheckpointError if there is an unquantised matrix too."""
        if self.has("weight"):
            raise CheckpointError(f"The checkpoint holds {self.stem}.weight twice, quantised and not.")

    def has(self, role: str) -> bool:
        return f"{self.stem}.{role}" in self._index

    def dtype(self, role: str) -> str | None:
        """Return the dtype of the tensor of a role, None without one."""
        info = self._index.get(f"{self.stem}.{role}")
        return None if info is None else info.dtype

    def take(self, role: str, dtypes: tuple[str, ...], dims: int | None = None) -> tuple[str, TensorInfo]:
        name = f"{self.stem}.{role}"
        info = self._index.get(name)
        if info is None:
            raise CheckpointError(f"The checkpoint lacks {name}, which belongs to a quantised matrix.")
        if info.dtype not in dtypes:
            raise CheckpointError(f"{name} is stored as {info.dtype}, not as {' or '.join(dtypes)}.")
        if dims is not None and (len(info.shape) != dims or 0 in info.shape):
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
    usual = next((size for _, size in quantization.widths), 0)
    is_usual = usual > 0 and num_groups == -(-depth // usual)  # The last group may be narrower.
    group = usual if is_usual else depth // num_groups
    if module.has("g_idx"):
        tensors["groups"] = module.take("g_idx", ("I32",), 1)
        module.check(tensors["groups"][1].shape == (depth,))
    else:
        is_even = depth % num_groups == 0 and (num_groups == 1 or group & group - 1 == 0)
        module.check(is_usual or is_even)
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


def _compressed(module: _Module, quantization: QuantizationSpec) -> TensorInfo:
    """Find a matrix of compressed-tensors, ModelOpt or FP8 without blocks: the dtype of its codes tells its layout."""
    codes = "weight_packed" if module.has("weight_packed") else "weight"
    dtype = module.dtype(codes)
    if dtype == "U8":
        find = _mxfp4 if module.dtype("weight_scale") == "U8" else _nvfp4
        return find(module, module.take(codes, ("U8",), 2))
    if dtype == "I32":
        return _words(module, module.take(codes, ("I32",), 2), quantization.widths)
    found = module.take(codes, ("I8", "F8_E4M3"), 2)
    num_rows, depth = found[1].shape
    scales = module.take("weight_scale" if module.has("weight_scale") else "weight_scale_inv", _FLOATS)
    tensors = {"codes": found, "scales": scales}
    rows, group = _shared_scales(module, scales[1].shape, (num_rows, depth), quantization.block)
    is_whole = group % 32 == 0
    if dtype == "F8_E4M3":
        part = PackedPart("fp8", tensors, 8, group, rows=rows)
        return module.joined(fp8_dtype(depth, group), (num_rows, depth), part)
    module.check(depth % group == 0)
    if module.has("weight_zero_point"):
        tensors["zeros"] = module.take("weight_zero_point", ("I8",), 2)
        module.check(tensors["zeros"][1].shape == tensors["scales"][1].shape)
    form = "INT8_ZERO" if "zeros" in tensors else "INT8_F32"
    return module.joined(
        form if is_whole else "F32", (num_rows, depth), PackedPart("codes", tensors, 8, group, rows=rows)
    )


def _shared_scales(
    module: _Module, shape: tuple[int, ...], matrix: tuple[int, int], block: tuple[int, int]
) -> tuple[int, int]:
    """Return the numbers of rows and of columns that share a scale. shape: of the scales; in blocks the last ones may
    be narrower. block: of matrices that have blocks."""
    if len(shape) == 4:  # ModelOpt's, with dimensions of 1.
        shape = shape[::2]
    num_bands, num_groups = {0: (1, 1), 1: (*shape, 1), 2: shape}.get(len(shape), (0, 0))
    num_rows, depth = matrix
    module.check(num_bands > 0 and num_groups > 0)
    if block != (1, 1) and (num_bands, num_groups) == (-(-num_rows // block[0]), -(-depth // block[1])):
        return block
    module.check(num_rows % num_bands == 0 and depth % num_groups == 0)
    return num_rows // num_bands, depth // num_groups


def _words(module: _Module, codes: tuple[str, TensorInfo], widths: tuple[tuple[int, int], ...]) -> TensorInfo:
    num_rows, num_words = codes[1].shape
    scales = module.take("weight_scale", _FLOATS, 2)
    num_groups = scales[1].shape[1]
    bits = _width_of(module, num_words, num_groups, widths)
    depth = num_words * 32 // bits
    module.check(scales[1].shape[0] == num_rows and depth % num_groups == 0)
    tensors, group = {"codes": codes, "scales": scales}, depth // num_groups
    if module.has("weight_zero_point"):
        zeros = tensors["zeros"] = module.take("weight_zero_point", ("I32", "I8"), 2)
        rows = num_rows if zeros[1].dtype == "I8" else -(-num_rows * bits // 32)
        module.check(zeros[1].shape == (rows, num_groups))
    if module.has("weight_g_idx"):
        tensors["groups"] = module.take("weight_g_idx", ("I32",), 1)
        module.check(tensors["groups"][1].shape == (depth,))
    has_order = num_groups > 1 and "groups" in tensors
    part = PackedPart("words", tensors, bits, group, has_order=has_order)
    return module.joined(_integers(bits, scales[1], depth, group), (num_rows, depth), part)


def _width_of(module: _Module, num_words: int, num_groups: int, widths: tuple[tuple[int, int], ...]) -> int:
    """Return the bits of a code: where there are several widths, of the one whose groups these are."""
    found = {bits for bits, _ in widths}
    if len(found) > 1:
        found = {
            bits for bits, group in widths if num_words * 32 // bits == num_groups * group or num_groups == 1 > group
        }
    module.check(len(found) == 1)
    return found.pop()


def _mxfp4(module: _Module, codes: tuple[str, TensorInfo]) -> TensorInfo:
    num_rows, depth = codes[1].shape[0], 2 * codes[1].shape[1]
    scales = module.take("weight_scale", ("U8",), 2)
    module.check(depth % 32 == 0 and scales[1].shape == (num_rows, depth // 32))
    return module.joined("MXFP4", (num_rows, depth), PackedPart("mxfp4", {"codes": codes, "scales": scales}, 4, 32))


def _nvfp4(module: _Module, codes: tuple[str, TensorInfo]) -> TensorInfo:
    """The scales of groups of 16 are multiplied by one number of the matrix (ModelOpt), or divided by it."""
    num_rows, depth = codes[1].shape[0], 2 * codes[1].shape[1]
    tensors = {"codes": codes, "scales": module.take("weight_scale", ("F8_E4M3",), 2)}
    module.check(depth % 64 == 0 and tensors["scales"][1].shape == (num_rows, depth // 16))
    role, name = (
        ("divisor", "weight_global_scale") if module.has("weight_global_scale") else ("factor", "weight_scale_2")
    )
    tensors[role] = module.take(name, _FLOATS)
    module.check(tensors[role][1].shape in ((), (1,)))
    return module.joined("NVFP4_F32", (num_rows, depth), PackedPart("nvfp4", tensors, 4, 16))


_Finder = Callable[[_Module, QuantizationSpec], TensorInfo]
_WORDS = (".qzeros", ".scales", ".g_idx")
# Scales of activations and of keys and values are not used: activations have scales of their own here, and keys and
# values are kept in full.
_COMPRESSED = (
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_global_scale",
    ".weight_scale_2",
    ".input_scale",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)
_SCALES = (".weight_scale", ".weight_scale_inv")
# By kind: the endings of the one tensor that each matrix has, those of its others, and how to find these.
_FINDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], _Finder]] = {
    "gptq": ((".qweight",), _WORDS, _gptq),
    "awq": ((".qweight",), _WORDS, _awq),
    "compressed-tensors": (_SCALES, _COMPRESSED, _compressed),
    "modelopt": (_SCALES, _COMPRESSED, _compressed),
    "fp8": (_SCALES, _COMPRESSED, _compressed),
}
