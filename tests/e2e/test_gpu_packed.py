"""`--device cuda` over HTTP with a GGUF file, whose weights stay in their bits.

Without a GPU the device is a CPU under Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_gpu_experts import SMALL, complete_all, take_device
from tests.support.service import service
from tests.support.tiny_gguf import write_gguf


@pytest.mark.kernel_change
@pytest.mark.timeout(900)  # three minutes in the interpreter on cores of its own
def test_a_gguf_file_on_a_gpu_says_what_a_cpu_says_in_exact_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    settings = (*SMALL[:-1], "256KiB", "--speculative-config", "none")
    with service(path, tmp_path / "cpu", *settings, "--arithmetic", "exact") as on_cpu:
        expected, _ = complete_all(on_cpu)
    take_device(monkeypatch)
    with service(path, tmp_path / "gpu", *settings, "--device", "cuda") as on_gpu:
        assert complete_all(on_gpu)[0] == expected
        (model,) = on_gpu.http.get("/v1/models").json()["data"]
        assert model["arithmetic"] == "float32, weights q4_1 and q8_0"
