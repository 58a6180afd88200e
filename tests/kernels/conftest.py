"""Triton kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined: before any test module imports one.
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from kernels.gpu.interpreter import mend_interpreter

    mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
