"""The bytes of packed weights are those of every earlier version: expert files outlive the version that wrote them.

Whoever changes a layout on purpose raises `experts.memory.file.VERSION` and records the bytes anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.cpu.experts import PanelLayout
from kernels.cpu.library import native_kernels
from kernels.cpu.panels import pack_panels
from kernels.cpu.quantised import pack_rows
from kernels.packed_experts import ExpertShape
from kernels.weight_formats import FORMATS, Q4_K, Q6_K, QuantizedRows, WeightFormat

NATIVE = native_kernels()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="There are no compiled kernels.")
_DIGESTS = {
    "q8_0": "e311c7b8f0a755f2",
    "q4_0": "0664bf62705bf6f6",
    "q4_1": "8357591d2cc755ff",
    "q5_0": "9947d49818a06998",
    "q5_1": "acc70864c247ff03",
    "q2_k": "e55872185f81f8c5",
    "q3_k": "21e33a8a75feaaa9",
    "q4_k": "fff9976c84bcf457",
    "q5_k": "26aecf2f3ab1c281",
    "q6_k": "0c651ee5835aaf52",
    "mxfp4": "04ad6d2e1cf320b2",
    "iq4_nl": "0664bf62705bf6f6",
    "iq4_xs": "835a3242273cf66a",
    "int4_f16": "d3646664b98274d4",
    "int4_bf16": "d3646664b98274d4",
    "int8_f32": "a690f0c3e20ea6b7",
    "int8_zero": "e4db261895701fa3",
    "fp8_f32": "9213e719f21f74f8",
    "fp8_128": "4531b99039e79f64",
    "nvfp4_f32": "fe816d151f284b7f",
    "float32": "5ff908b42ba8cb22",
    "bfloat16": "a899ff3c8e1cefe7",
    "expert": "60fd33c00b5d5af1",
}


def random_bytes(*size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8))


def rows_of(form: WeightFormat, num_rows: int = 64, depth: int = 512) -> QuantizedRows:
    return QuantizedRows(form, random_bytes(num_rows, form.row_bytes(depth)), depth)


def packed_rows(form: WeightFormat) -> torch.Tensor:
    assert NATIVE is not None
    return pack_rows(rows_of(form), NATIVE)


def packed_numbers(dtype: torch.dtype) -> torch.Tensor:
    assert NATIVE is not None
    return pack_panels(random_bytes(48, 100 * dtype.itemsize).view(dtype), NATIVE)


def packed_expert() -> torch.Tensor:
    """Gate and up in panels with zeros at their ends, then down."""
    assert NATIVE is not None
    shape = ExpertShape(256, 768, torch.float32, torch.float32, formats=(Q4_K, Q6_K))
    return PanelLayout(shape, NATIVE).pack((rows_of(Q4_K, 1536, 256), rows_of(Q6_K, 256, 768), None, None))


CASES: dict[str, Callable[[], torch.Tensor]] = {
    **{name: lambda form=form: packed_rows(form) for name, form in FORMATS.items()},
    "float32": lambda: packed_numbers(torch.float32),
    "bfloat16": lambda: packed_numbers(torch.bfloat16),
    "expert": packed_expert,
}


@pytest.mark.parametrize("case", CASES)
def test_packed_bytes_stay_the_same(case: str) -> None:
    assert hashlib.sha256(CASES[case]().numpy().tobytes()).hexdigest()[:16] == _DIGESTS[case]
