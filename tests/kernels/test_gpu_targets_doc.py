"""The page about GPU benchmarks names the targets that the benchmarks judge by, and no figure."""

from pathlib import Path

from benchmarks.kernels.report import TARGETS
from benchmarks.steps import TARGET_BATCHES, TARGET_PART, TARGET_RATE

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-gpu.md"


def test_targets_of_the_page_are_those_of_the_benchmarks():
    cells = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [tuple(cell.strip() for cell in row) for row in cells if row[0].strip() not in ("case", "batch")]
    kernels = [(target.case, target.asked) for target in TARGETS]
    decode = [
        ("1", f"{TARGET_RATE} tokens/s"),
        *((str(batch), f"{TARGET_PART:.0%} of the bound") for batch in TARGET_BATCHES),
    ]
    assert [row[:2] for row in rows] == kernels + decode


def test_what_was_not_measured_says_so():
    measured = list((PAGE.parent / "benchmarks").glob("*.md"))
    assert measured or PAGE.read_text().count("| not measured |") == len(TARGETS) + 1 + len(TARGET_BATCHES)
