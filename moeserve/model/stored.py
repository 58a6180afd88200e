"""The tensors of safetensors files by their headers. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeserve.model.files import check_weights_file, read_json
from moeserve.model.spec import CheckpointError, MissingWeights, ModelError

if TYPE_CHECKING:
    from moeserve.model.gguf.parts import GgufPart

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # The format's own limit.
_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16}
_ITEM_BITS |= {"U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4}


def is_in_blocks(dtype: str) -> bool:
    """Return whether a dtype is a kind of ggml or a format of `kernels.weight_formats`, whose numbers lie in blocks."""
    return dtype not in _ITEM_BITS


def item_bits(dtype: str) -> int:
    """Return the bits of one number of a dtype that safetensors names."""
    return _ITEM_BITS[dtype]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    dtype: as safetensors names it (``F32``, ``BF16``, ``F8_E4M3``, ``U8``, ...), as ggml does (``Q4_K``), or the format
    of a matrix that consists of several tensors. gguf: where it lies in a GGUF file. packed: these several tensors.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    gguf: GgufPart | None = None
    packed: PackedPart | None = None


# gptq: codes in words along columns, zero points along rows. awq: both along rows, in an order of its own. words: codes
# in words along rows, zero points along columns. codes: integers of 8 bits. fp8: floats of 8 bits. nvfp4, mxfp4: pairs
# of floats of 4 bits.
Layout = Literal["gptq", "awq", "words", "codes", "fp8", "nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class PackedPart:
    """The tensors of a quantised matrix [N, K] by their roles, with their names in the files.

    bits: of a code. group: columns that share a scale. rows: rows that share one. zeros_less_one: zero points are
    stored less one. has_order: columns belong to groups in an order that the matrix tells.
    """

    layout: Layout
    tensors: Mapping[str, tuple[str, TensorInfo]]
    bits: int
    group: int
    zeros_less_one: bool = False
    has_order: bool = False
    rows: int = 1


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model in the order in which they are read. Raise CheckpointError."""
    return _files_of(directory, _promised(directory))


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Return the tensors of the safetensors files in ``directory`` by name. See `checkpoint.read_index`."""
    promised = _promised(directory)
    tensors: dict[str, TensorInfo] = {}
    for file in _files_of(directory, promised):
        tensors |= _read_header(file)
    for name, file in promised.items():
        if name not in tensors:
            raise CheckpointError(f"{file.name} does not hold the tensor {name} that the index promises.")
    return tensors


def _promised(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor by the index; nothing without one."""
    path = directory / _INDEX
    if not path.is_file():
        return {}
    try:
        return {name: directory / file for name, file in read_json(path)["weight_map"].items()}
    except (ModelError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is not a valid safetensors index.") from None


def _files_of(directory: Path, promised: Mapping[str, Path]) -> list[Path]:
    for file in (files := sorted(set(promised.values()))):
        if file.parent != directory:
            raise CheckpointError(f"{directory / _INDEX} names a file outside its folder.")
        if not file.is_file():
            raise MissingWeights(f"{file.name} is missing from {directory}.")
    if files:
        return files
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    others = sorted(directory.glob("*.safetensors"))
    if len(others) > 1:
        raise MissingWeights(f"{directory} holds {len(others)} safetensors files but no {_INDEX}.")
    if not others:
        if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
            raise MissingWeights(f"{directory} holds pickled weights only; moeserve reads safetensors.")
        raise MissingWeights(f"There are no weights in {directory}: neither {_SINGLE} nor {_INDEX}.")
    return others


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file by name. Checks that the file is as long as its header says."""
    size = check_weights_file(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path.name} is truncated or not a safetensors file: download it again.")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name} is damaged, its header does not decode: download it again.") from None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise CheckpointError(f"{path.name} is damaged, its header is no list of tensors: download it again.")
    header.pop("__metadata__", None)
    try:
        tensors = {name: _tensor_info(path, entry) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (KeyError, TypeError, ValueError, IndexError):
        raise CheckpointError(f"{path.name} is damaged, its header is no list of tensors: download it again.") from None
    if size < 8 + length + end:
        raise CheckpointError(
            f"{path.name} is truncated, {size} of {8 + length + end} bytes are there: download it again."
        )
    return tensors


def _tensor_info(path: Path, entry: Mapping[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    num_bytes = prod(shape) * _ITEM_BITS[entry["dtype"]] // 8
    if begin < 0 or min(shape, default=0) < 0 or end - begin != num_bytes:
        raise ValueError("offsets do not fit the shape")
    return TensorInfo(path, entry["dtype"], shape, num_bytes)
