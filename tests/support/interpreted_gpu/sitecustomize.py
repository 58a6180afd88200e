"""Python loads it at its start where PYTHONPATH names this folder: from then on there is "a GPU" for every rank.

It is a CPU whose kernels run in Triton's interpreter, and gloo carries what NCCL would.
"""

import os
from typing import TYPE_CHECKING

import moeserve.device

if TYPE_CHECKING:
    import torch

os.environ |= {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}


def interpreted() -> "torch.device":
    import torch

    from benchmarks.kernels.interpreter import mend_interpreter

    mend_interpreter()
    return torch.device("cpu")


moeserve.device.cuda_absence = lambda needs_fp8: None
moeserve.device.current_gpu = interpreted
