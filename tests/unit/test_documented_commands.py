"""The commands of README and guides: the program knows them, and each job takes as few as the guides promise."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from launcher.cli import main

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (ROOT, ROOT / "docs", ROOT / "docs" / "guide", ROOT / "examples")
PAGES = sorted(str(path.relative_to(ROOT)) for folder in _FOLDERS for path in folder.glob("*.md"))


def blocks(page: str) -> list[list[str]]:
    """Return the lines of each block of commands of a page, without comments."""
    text = (ROOT / page).read_text()
    found = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [[line for line in map(uncommented, block.replace("\\\n", " ").splitlines()) if line] for block in found]


def uncommented(line: str) -> str:
    return re.sub(r"(^|\s)#\s.*", "", line).strip()


def calls(page: str, program: str) -> Iterator[list[str]]:
    """Yield the words behind each call of a program in a page's blocks."""
    for line in (line for block in blocks(page) for line in block):
        for part in re.split(r"&&|\|\||[|;<>]", line):
            try:
                words = [word for word in shlex.split(part) if word not in ("sudo", "exec")]
            except ValueError:  # a quotation that spans lines
                continue
            if words and Path(words[0]).name == program and words[0] in (program, f".venv/bin/{program}"):
                yield words[1:]


def parse(words: list[str]) -> None:
    """Read a command as the program would. Raise UsageError."""
    command, context, name = main, None, "moeserve"
    try:
        while isinstance(command, click.Group):
            context = command.make_context(name, list(words), parent=context)
            _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[assignment]
            name = command.name or ""
        command.make_context(name, list(words), parent=context)
    except click.exceptions.Exit:  # of --help and --version
        return


@pytest.mark.parametrize("page", [page for page in PAGES if next(calls(page, "moeserve"), None) is not None])
def test_the_program_knows_every_command_of_a_page(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files and servers are the reader's.
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *__: value)
    monkeypatch.setattr("launcher.server_client.why_not_own", lambda: None)
    for words in calls(page, "moeserve"):
        try:
            parse(words)
        except click.UsageError as error:
            pytest.fail(f"{page}: moeserve {shlex.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES)
def test_make_knows_every_target_of_a_page(page: str) -> None:
    known = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert known is not None
    asked = {word for words in calls(page, "make") for word in words if "=" not in word}
    assert asked <= set(known[1].split())


@pytest.mark.parametrize(
    ("page", "beginning", "most"),
    [
        ("README.md", ".venv/bin/moeserve launch --serve auto codex", 3),
        ("docs/guide/team.md", "sudo make install MODEL=", 6),
        ("docs/guide/gpus.md", ".venv/bin/moeserve check MODEL --device cuda", 3),
    ],
)
def test_a_job_begins_with_the_clone_and_takes_few_commands(page: str, beginning: str, most: int) -> None:
    block = next(block for block in blocks(page) if any(line.startswith(beginning) for line in block))
    assert block[0].startswith("git clone ")
    assert len(block) <= most


def test_install_puts_a_service_into_place_and_leaves_settings_and_keys(tmp_path: Path) -> None:
    python = tmp_path / "python"
    # It stands in for an interpreter: what it is asked to make an environment of has a pip that says what it gets.
    python.write_text(
        '#!/bin/sh\ntest "$1" = -c && exit 0\nmkdir -p "$3/bin"\n'
        'printf \'#!/bin/sh\\necho pip "$@"\\n\' > "$3/bin/pip"; chmod +x "$3/bin/pip"\n'
    )
    python.chmod(0o755)
    root = tmp_path / "root"
    command = ["make", "--no-print-directory", "install", f"DESTDIR={root}", f"PYTHON={python}"]

    def make(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))

    refused = make()
    assert (refused.returncode, "MODEL=owner/name:Q4_K_M" in refused.stderr) == (2, True)
    done = make("MODEL=owner/name:Q4_K_M")
    assert done.returncode == 0, done.stderr
    assert "pip install --progress-bar=off --constraint constraints.txt ." in done.stdout
    settings, keys = root / "etc/moeserve/moeserve.toml", root / "etc/moeserve/keys"
    assert 'model = "owner/name:Q4_K_M"\n' in settings.read_text()
    assert (keys.read_text(), keys.stat().st_mode & 0o777) == ("", 0o600)
    assert "/opt/moeserve/.venv/bin/moeserve serve" in (root / "etc/systemd/system/moeserve.service").read_text()
    assert os.readlink(root / "usr/local/bin/moeserve") == "/opt/moeserve/.venv/bin/moeserve"
    settings.write_text("port = 1\n")
    keys.write_text("user:sk-a\n")
    assert make().returncode == 0
    assert (settings.read_text(), keys.read_text()) == ("port = 1\n", "user:sk-a\n")


def test_an_older_python_is_refused_with_what_to_write(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "venv", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, "moeserve needs Python 3.11 or newer: make PYTHON=python3.11" in done.stderr) == (2, True)
