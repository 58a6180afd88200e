"""Two real gloo processes: whatever the shape of dispatch, rows get what their experts give at home."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forking import popen

ROOT = Path(__file__).resolve().parents[2]


def test_a_service_of_one_rank_loads_nothing_of_this() -> None:
    code = (
        "import sys, moeserve.engine.service, torch.distributed\n"
        "print([name for name in sys.modules if name.startswith(('deepspeed', 'experts.parallel.collectives'))])\n"
        "print(torch.distributed.is_initialized())"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["[]", "False"]


@pytest.mark.parametrize(
    ("num_ranks", "num_redundant", "dtype", "combine"),
    [
        pytest.param(2, 0, "float32", "float32", marks=pytest.mark.long),
        (3, 0, "bfloat16", "float32"),
        (2, 4, "bfloat16", "bfloat16"),
        pytest.param(3, 6, "float32", "bfloat16", marks=pytest.mark.long),
        (4, 4, "float32", "float32"),
    ],
)
def test_all_shapes_agree_with_local_experts_and_with_each_other(
    tmp_path: Path, num_ranks: int, num_redundant: int, dtype: str, combine: str
) -> None:
    sizes = [str(num_ranks), str(num_redundant), dtype, combine, str(tmp_path / "s")]
    ranks = [
        popen(
            [sys.executable, "-m", "tests.support.dispatch_rank", str(rank), *sizes],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, said
        assert "all agree" in said
