"""The command line as a user types it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli import main
from moeserve.config import VERSION

ROOT = Path(__file__).resolve().parents[2]


def moeserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version_names_moeserve_and_torch():
    result = CliRunner().invoke(main, ["version"])
    assert result.exit_code == 0
    assert f"moeserve {VERSION}\n" in result.output
    assert "torch 2" in result.output


def test_the_version_is_an_option_too():
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"moeserve {VERSION}\n")


def test_help_lists_settings_under_headings_and_names_their_variables():
    result = CliRunner().invoke(main, ["serve", "--help"])
    assert result.exit_code == 0
    headings = [line for line in result.output.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Model:",
        "Experts:",
        "Several nodes:",
        "Memory and scheduling:",
        "Expert memory:",
        "HTTP:",
        "Operation:",
        "Other:",
    ]
    assert "MOESERVE_KV_CACHE_MEMORY" in result.output
    assert "--no-enable-prefix-caching" in result.output


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom launcher.cli import main\n"
        "assert CliRunner().invoke(main, ['serve', '--help']).exit_code == 0\n"
        "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--port", "high"], {}, "--port: 'high' is not a whole number"),
        ([], {"MOESERVE_DTYPE": "int3"}, "MOESERVE_DTYPE: 'int3' is not one of"),
        (["--config", "none.toml"], {}, "cannot read none.toml"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_two(arguments, environment, sentence):
    result = moeserve("serve", *arguments, **environment)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_one_sentence_and_exit_code_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = moeserve("serve", "--port", str(port))
    assert result.returncode == 1
    assert f"Port {port} on 127.0.0.1 is taken" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_model_directory_is_one_sentence(tmp_path):
    result = moeserve("serve", "--port", "0", str(tmp_path / "none"))
    assert result.returncode == 1
    assert f"There is no folder {tmp_path / 'none'}" in result.stderr


def test_listening_beyond_loopback_without_a_key_is_warned_about(tmp_path):
    result = moeserve("serve", "--host", "0.0.0.0", "--port", "0", str(tmp_path / "none"))
    assert "Warning: 0.0.0.0 is reachable from other machines" in result.stderr


def test_a_key_silences_the_warning(tmp_path):
    result = moeserve("serve", "--host", "0.0.0.0", "--port", "0", str(tmp_path / "none"), MOESERVE_API_KEY="k")
    assert "Warning" not in result.stderr


def test_another_system_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    result = CliRunner().invoke(main, ["serve"])
    assert result.exit_code == 1
    assert "moeserve runs on Linux only; this is darwin" in result.stderr
