"""When the long tests of the kernels are due."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checked_kernels import RECORD, main

KERNELS = Path("kernels/gpu")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in (KERNELS / "tuned", RECORD.parent):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / KERNELS / "norm.py").write_text("a kernel")
    (tmp_path / KERNELS / "tuned" / "h200.json").write_text("{}")
    (tmp_path / "moeserve").mkdir()
    (tmp_path / "constraints.txt").write_text("numpy==2.2\ntorch==2.13.0\ntriton==3.7.0\n")
    return tmp_path


def test_without_a_record_they_are_due_and_with_one_they_are_not(root: Path) -> None:
    assert main(root) == 1
    assert main(root, "--record") == 0
    assert main(root) == 0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (KERNELS / "norm.py", "another kernel"),
        (KERNELS / "new.py", ""),
        (Path("tests/kernels/test_norm.py"), "a test"),
        (Path("moeserve/plan.py"), "another contract"),
        (KERNELS / "tuned" / "h200.json", "{ }"),
        (Path("constraints.txt"), "numpy==2.2\ntorch==2.13.0\ntriton==3.8.0\n"),
    ],
)
def test_a_change_of_a_kernel_or_of_its_compiler_makes_them_due(root: Path, path: Path, text: str) -> None:
    main(root, "--record")
    (root / path).write_text(text)
    assert main(root) == 1


def test_comments_and_docstrings_are_no_change(root: Path) -> None:
    kernel = root / KERNELS / "scale.py"
    kernel.write_text("def scale(x):\n    return 2 * x\n")
    main(root, "--record")
    kernel.write_text('def scale(x):\n    """Double x."""\n    return 2 * x  # In place of a sum.\n')
    assert main(root) == 0
    kernel.write_text("def scale(x):\n    return 3 * x\n")
    assert main(root) == 1


def test_a_change_elsewhere_does_not(root: Path) -> None:
    main(root, "--record")
    (root / "moeserve" / "scheduler.py").write_text("decides without a GPU")
    (root / "constraints.txt").write_text("numpy==2.3\ntorch==2.13.0\ntriton==3.7.0\n")
    assert main(root) == 0
