"""`moeserve cache list|verify|clear DIR`: the folder of `--kv-disk-path`, or of `--expert-store-dir`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from moeserve.engine.kv.disk.files import ABOUT, clear, is_root, scan, why_damaged
from moeserve.model.cache import remove_built, verify
from moeserve.model.expert_folders import EXPERT_FILE, expert_folders, is_expert_store
from moeserve.model.spec import ModelError
from moeserve.settings.quantities import show_size

_HOUR_SECONDS = 3600.0
_MOST_SHOWN = 20  # damaged files that are named


def _list_kv(folder: Path) -> None:
    now = time.time()
    groups: dict[str, list[Any]] = {}
    for block in scan(folder, now):
        groups.setdefault(block.folder.split("/")[0], []).append(block)
    for fingerprint, blocks in sorted(groups.items()):
        about: dict[str, Any] = {}
        with suppress(OSError, msgspec.DecodeError):
            about = msgspec.json.decode((folder / fingerprint / ABOUT).read_bytes(), type=dict[str, Any])
        num_blocks = sum(block.is_kv for block in blocks)
        tokens = num_blocks * int(about.get("block_size", 0))
        size = show_size(sum(block.num_bytes for block in blocks))
        unused = [(now - block.used_at) / _HOUR_SECONDS for block in blocks]
        click.echo(f"{fingerprint}  {about.get('model', 'unknown model')}, {about.get('arithmetic', '')}")
        namespaces = len({block.folder for block in blocks})
        used = f"used {max(0.0, min(unused)):.1f} to {max(unused):.1f} hours ago"
        click.echo(f"  {num_blocks:,} blocks = {tokens:,} tokens, {size}, of {namespaces} keys and salts, {used}")
    if not groups:
        click.echo(f"{folder} holds no blocks.")


def _verify_kv(folder: Path) -> None:
    num_files, damaged = 0, []
    for block in scan(folder, time.time()):
        with suppress(FileNotFoundError):
            why = why_damaged(folder, block)
            num_files += 1
            if why is not None:
                damaged.append(f"{block.path}: {why}")
    _report(num_files, damaged)


def _clear_kv(folder: Path) -> None:
    click.echo(f"{clear(folder):,} blocks removed.")


def _list_experts(folder: Path) -> None:
    now = time.time()
    if not (names := expert_folders(folder)):
        click.echo(f"{folder} holds no expert files.")
    for name in names:
        try:
            found = (folder / name / EXPERT_FILE).stat()
        except FileNotFoundError:
            click.echo(f"{name}  unfinished")
            continue
        written = max(0.0, now - found.st_mtime) / _HOUR_SECONDS
        click.echo(f"{name}  {show_size(found.st_size)}, written {written:.1f} hours ago")


def _verify_experts(folder: Path) -> None:
    damaged = []
    names = [name for name in expert_folders(folder) if (folder / name).is_dir()]
    for name in names:
        try:
            verify(folder / name, thorough=True)
        except ModelError as error:
            damaged.append(str(error))
    _report(len(names), damaged)


def _clear_experts(folder: Path) -> None:
    names = expert_folders(folder)
    num_bytes = sum(remove_built(folder / name) for name in names)
    click.echo(f"{len(names):,} expert files removed, {show_size(num_bytes)}.")


def _report(num_files: int, damaged: Sequence[str]) -> None:
    for line in damaged[:_MOST_SHOWN]:
        click.echo(line)
    click.echo(f"{num_files:,} files, {len(damaged):,} damaged.")
    if damaged:
        sys.exit(1)


def _command(name: str, about: str, of_kv: Callable[[Path], None], of_experts: Callable[[Path], None]) -> click.Command:
    """Make a command that takes a folder of either kind, and says in one sentence why it cannot be used."""

    @click.command(name=name, help=about)
    @click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
    def command(folder: Path) -> None:
        try:
            if is_root(folder):
                of_kv(folder)
            elif is_expert_store(folder):
                of_experts(folder)
            else:
                raise click.ClickException(f"{folder} is no folder of --kv-disk-path or --expert-store-dir.")
        except OSError as error:
            raise click.ClickException(f"{error.filename or folder} cannot be used: {error.strerror}.") from error

    return command


list_command = _command(
    "list",
    "Show what the folder DIR holds: of each model blocks, tokens, bytes and when they were used last, or its expert "
    "files.",
    _list_kv,
    _list_experts,
)
verify_command = _command(
    "verify",
    "Read every file in the folder DIR and compare it with its hash. Exit code 1 if one is damaged.",
    _verify_kv,
    _verify_experts,
)
clear_command = _command(
    "clear",
    "Remove all blocks of the folder DIR, of all models and keys, or all expert files. A service that uses it goes on.",
    _clear_kv,
    _clear_experts,
)
