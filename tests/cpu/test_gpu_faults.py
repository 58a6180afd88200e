"""Machines on which a GPU cannot be used, or not now, as torch and Triton tell of them: each is said in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.driver import driver

from moeserve.config import ConfigError
from moeserve.device import cuda_absence
from moeserve.gpu_faults import gpu_faults_in_words, lacks_kernels
from moeserve.machine import find_gpus
from moeserve.model.gpu.model import GpuSettings, free_for_kv

GIB = 2**30
ADVICE = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
BUSY = torch.AcceleratorError(f"CUDA error: all CUDA-capable devices are busy or unavailable{ADVICE}")
FULL = torch.AcceleratorError(f"CUDA error: out of memory{ADVICE}")
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"
NOT_READY = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized"
)
BUILT_FOR = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@dataclass
class Card:
    """memory: free and total bytes, or what asking for them raises."""

    name: str = "NVIDIA GeForce RTX 4090"
    capability: tuple[int, int] = (8, 9)
    memory: tuple[int, int] | Exception = (22 * GIB, 24 * GIB)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives torch these cards, with a driver that works."""

    def give(*cards: Card) -> None:
        def properties(device: torch.device) -> SimpleNamespace:
            card = cards[device.index]
            major, minor = card.capability
            return SimpleNamespace(
                name=card.name,
                major=major,
                minor=minor,
                total_memory=24 * GIB,
                shared_memory_per_block=48 << 10,
                shared_memory_per_block_optin=99 << 10,
            )

        def memory(device: torch.device | None = None) -> tuple[int, int]:
            found = cards[0 if device is None else device.index].memory
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name, answer in {
            "is_available": lambda: bool(cards),
            "device_count": lambda: len(cards),
            "get_device_capability": lambda *_: cards[0].capability,
            "get_device_properties": properties,
            "get_arch_list": lambda: BUILT_FOR,
            "mem_get_info": memory,
            "memory_reserved": lambda *_: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: None))
        monkeypatch.setattr("moeserve.machine._copied_per_second", lambda _: 9e11)

    return give


@pytest.mark.parametrize(
    ("error", "visible", "reason"),
    [
        (NO_DRIVER, None, "Found no NVIDIA driver on your system"),
        (
            OLD_DRIVER,
            None,
            "The NVIDIA driver on your system is too old (found version 12020), for torch is built for CUDA 13.0",
        ),
        (NOT_READY, None, "Error 802: system not yet initialized"),
        ("No CUDA GPUs are available", "", "No CUDA GPUs are available (CUDA_VISIBLE_DEVICES is '')"),
        ("No CUDA GPUs are available", "GPU-1f", "No CUDA GPUs are available (CUDA_VISIBLE_DEVICES is 'GPU-1f')"),
    ],
)
def test_why_torch_finds_no_gpu_is_said_in_a_sentence(
    have: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: str, visible: str | None, reason: str
) -> None:
    have()
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(error)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_absence(False) == f"torch finds no CUDA device: {reason}"


def test_a_build_of_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda_absence(False) == "this build of torch has no CUDA; make venv TORCH=cuda installs one that has"


def test_a_card_that_is_too_old_is_refused_and_with_another_card_beside_it_the_choice_is_named(
    have: Callable[..., None],
) -> None:
    have(turing := Card("NVIDIA T4", (7, 5)))
    assert cuda_absence(False) == "compute capability 7.5 is below 8.0"
    have(turing, Card())
    assert cuda_absence(False) == "compute capability 7.5 is below 8.0; CUDA_VISIBLE_DEVICES chooses another GPU"
    have(Card(), turing)
    assert cuda_absence(False) is None


def test_a_card_that_is_newer_than_torch_is_refused_before_a_kernel_fails(
    have: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(Card("NVIDIA GeForce RTX 5090", (12, 0)))
    assert cuda_absence(False) is None
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90"])
    assert cuda_absence(False) == "this build of torch has no kernels for compute capability 12.0"
    assert find_gpus()[0].obstacle == "this build of torch has no kernels for compute capability 12.0"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 9), ["sm_80", "sm_90"], True),  # binaries of 8.0 run on 8.9
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_90", "compute_90"], True),  # which the driver compiles
        ((10, 0), ["sm_90", "compute_120"], False),
        ((10, 3), ["sm_100"], True),
        ((8, 6), [], True),
        ((8, 6), ["gfx942"], True),
    ],
)
def test_a_gpu_runs_what_was_built_for_an_older_one_of_its_generation(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert (lacks_kernels(capability, architectures) is None) == runs


def test_a_gpu_that_another_process_has_alone_is_said_without_advice_for_programmers(
    have: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(Card())
    monkeypatch.setattr(torch.cuda, "get_device_capability", raising(BUSY))
    assert cuda_absence(False) == (
        "torch cannot use the GPU: CUDA error: all CUDA-capable devices are busy or unavailable"
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set knobs."),
            "Triton needs a C compiler and the headers of Python, as of gcc and python3-dev: Failed to find C compiler",
        ),
        (
            CalledProcessError(1, ["gcc", "cuda_utils.c"]),
            "Triton needs a C compiler and the headers of Python, as of gcc and python3-dev: Command '['gcc', "
            "'cuda_utils.c']' returned non-zero exit status 1",
        ),
        (AssertionError("libcuda.so cannot found!\nPlease"), "Triton cannot use the GPU: libcuda.so cannot found!"),
    ],
)
def test_what_triton_lacks_is_said_before_a_model_is_loaded(
    have: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    have(Card())
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=raising(error)))
    assert cuda_absence(False) == reason


def test_a_full_gpu_beside_a_free_one_is_described_and_nothing_fails(have: Callable[..., None]) -> None:
    have(Card(), Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), FULL))
    free, full = find_gpus()
    assert (free.free_bytes, free.bandwidth, free.obstacle) == (22 * GIB, 9e11, None)
    assert (full.free_bytes, full.bandwidth) == (0, None)
    assert full.obstacle == "torch cannot use it: CUDA error: out of memory"


def test_memory_that_another_process_takes_while_a_gpu_is_measured_is_no_obstacle(
    have: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(Card())
    monkeypatch.setattr("moeserve.machine._copied_per_second", raising(torch.OutOfMemoryError("CUDA out of memory.")))
    (gpu,) = find_gpus()
    assert (gpu.free_bytes, gpu.bandwidth, gpu.obstacle) == (0, None, None)


def said_of(error: Exception) -> str:
    with pytest.raises(ConfigError) as caught, gpu_faults_in_words():
        raise error
    return str(caught.value)


def test_a_model_that_does_not_fit_the_memory_is_a_sentence_that_says_who_holds_it(have: Callable[..., None]) -> None:
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of")
    have(Card(memory=(23 * GIB, 24 * GIB)))
    assert said_of(short) == (
        "--device cuda: the model does not fit: the GPU has 24 GiB; moeserve doctor MODEL says what fits."
    )
    have(Card(memory=(4 * GIB, 24 * GIB)), Card())
    assert said_of(short) == (
        "--device cuda: the model does not fit: the GPU has 24 GiB, of which other processes hold 20 GiB; moeserve "
        "doctor MODEL says what fits; CUDA_VISIBLE_DEVICES chooses another GPU."
    )


def test_faults_of_the_machine_are_sentences_and_faults_of_kernels_stay_what_they_are(
    have: Callable[..., None],
) -> None:
    have(Card())
    assert said_of(FULL) == "--device cuda: torch cannot use the GPU: CUDA error: out of memory."
    wrong = torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{ADVICE}")
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"), gpu_faults_in_words():
        raise wrong


def test_weights_that_leave_nothing_for_keys_and_values_are_said_with_who_holds_the_memory(
    have: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(Card(memory=(2 * GIB, 24 * GIB)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 17 * GIB)
    settings = GpuSettings(64, 256, 512, None, None, 0.9, enforce_eager=True)
    with pytest.raises(ConfigError, match="the largest step take 17 GiB, and the GPU has 24 GiB, of which other"):
        free_for_kv(torch.device("cuda", 0), settings, 0)
