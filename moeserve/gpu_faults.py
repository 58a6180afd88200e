"""Say why this machine's GPU cannot be used: the driver, the build of torch, Triton, or another process."""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from moeserve.config import ConfigError
from moeserve.settings.quantities import show_size

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Bytes of a GPU that are not torch's, above which they are taken for other processes': CUDA itself takes some 600 MB.
_CONTEXT_BYTES = 2**30
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?")
# Words of CUDA's errors that say nothing of this program.
_FAULTS_OF_MACHINES = ("out of memory", "busy or unavailable", "no kernel image", "not yet initialized")


def without_warnings() -> AbstractContextManager[Any]:
    """Return a context in which torch warns of nothing that is said otherwise."""
    return warnings.catch_warnings(action="ignore")


def cuda_is_available() -> bool:
    """Return whether torch finds a GPU. What it warns of otherwise, `cuda_absence` says."""
    import torch

    with without_warnings():
        return torch.cuda.is_available()


def no_device() -> str:
    """Return why a torch with CUDA finds no GPU."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it so
        reason = "none is there"
    except RuntimeError as error:
        reason = reason_of(error)
    if "too old" in reason:
        reason += f", for torch is built for CUDA {torch.version.cuda}"
    visible = os.environ.get(_VISIBLE)
    told = "" if visible is None else f" ({_VISIBLE} is {visible!r})"
    return f"torch finds no CUDA device: {reason}{told}"


def triton_absence() -> str | None:
    """Return why Triton launches nothing; None if it does. It compiles a part of itself when it begins."""
    try:
        from triton.runtime.driver import driver
    except ImportError:
        return "Triton is not installed"
    try:
        driver.active.get_current_target()
    except Exception as error:  # of a compiler, a linker or the driver
        reason = reason_of(error)
        if "compiler" in reason or isinstance(error, subprocess.CalledProcessError):
            return f"Triton needs a C compiler and the headers of Python, as of gcc and python3-dev: {reason}"
        return f"Triton cannot use the GPU: {reason}"
    return None


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error, without a full stop, or CUDA's own error where it names one."""
    text = str(error) or type(error).__name__
    said = re.search(r"Error \d+: [^\n]+", text)
    return (said[0] if said else re.split(r"\. |\n", text)[0]).rstrip(". ")


@contextmanager
def gpu_faults_in_words() -> Iterator[None]:
    """Turn a lack of a GPU's memory, and errors of CUDA that the machine is at fault for, into a ConfigError."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError(f"--device cuda: the model does not fit: {gpu_memory_said()}.") from None
    except torch.AcceleratorError as error:
        if not any(words in str(error) for words in _FAULTS_OF_MACHINES):
            raise
        raise ConfigError(f"--device cuda: torch cannot use the GPU: {reason_of(error)}.") from error


def gpu_memory_said() -> str:
    """Say who holds the memory of the current GPU, and what to do about it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    of_others = total - free - torch.cuda.memory_reserved()
    said = f"the GPU has {show_size(total)}"
    if of_others > _CONTEXT_BYTES:
        said += f", of which other processes hold {show_size(of_others)}"
    return f"{said}; moeserve doctor MODEL says what fits{another_gpu()}"


def another_gpu() -> str:
    """Return a clause on the choice between several GPUs; empty if there is one."""
    import torch

    return f"; {_VISIBLE} chooses another GPU" if torch.cuda.device_count() > 1 else ""


def lacks_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> str | None:
    """Return why the kernels that torch brings do not run on a GPU; None if they do, or torch does not tell.

    architectures: the ones that torch is built for, as `sm_90` for binaries, which newer GPUs of the same major number
    run too, and `compute_90` for code that any newer GPU compiles.
    """
    known = [found.groups() for each in architectures if (found := _ARCHITECTURE.fullmatch(each))]
    for kind, major, minor in known:
        built_for = int(major), int(minor)
        if built_for <= capability and (kind == "compute" or built_for[0] == capability[0]):
            return None
    of_gpu = ".".join(map(str, capability))
    return f"this build of torch has no kernels for compute capability {of_gpu}" if known else None
