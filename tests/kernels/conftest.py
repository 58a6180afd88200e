"""Triton kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors."""

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined: before any test module imports one.
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from benchmarks.kernels.interpreter import mend_interpreter

    mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def dots_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply one row at a time.

    The last bits of a row of numpy's product depend on the row's place in the matrix on some CPUs; a GPU's do not.
    """
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any, **named: Any) -> Any:
        rows = [
            plain(
                self,
                TensorHandle(a.data[..., row : row + 1, :].copy(), a.dtype.scalar),
                b,
                TensorHandle(d.data[..., row : row + 1, :].copy(), d.dtype.scalar),
                *rest,
                **named,
            ).data
            for row in range(a.data.shape[-2])
        ]
        return TensorHandle(np.concatenate(rows, -2), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
