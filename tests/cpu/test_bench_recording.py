"""`python -m benchmarks.recording` on a tiny model."""

import re
from pathlib import Path

from click.testing import CliRunner

from benchmarks.recording import command
from tests.support.tiny_models import save


def test_both_parts_are_measured(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    result = CliRunner().invoke(command, [str(tmp_path), "--streams", "2", "--steps", "20"])
    assert result.exit_code == 0, result.output
    found = re.fullmatch(r"2 streams: step (\S+) ms, recording (\d+) us CPU, (\S+) %\n", result.output)
    assert found
    assert float(found[1]) > 0
    assert int(found[2]) > 0


def test_a_dense_model_has_nothing_to_record(tmp_path: Path) -> None:
    save("llama", tmp_path)
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 1
    assert "no experts" in result.output
