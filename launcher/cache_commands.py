"""`moeserve cache list|verify|clear DIR`: the folder of `--kv-disk-path`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click
import msgspec

from moeserve.engine.kv_disk.files import ABOUT, clear, is_root, scan, why_damaged
from moeserve.settings.quantities import show_size

_HOUR_SECONDS = 3600.0
_MOST_SHOWN = 20  # damaged files that are named


def _command(name: str) -> Callable[[Callable[[Path], None]], click.Command]:
    """Make a command that takes a folder of KV, and says in one sentence why it cannot be used."""

    def decorate(run: Callable[[Path], None]) -> click.Command:
        @click.command(name=name)
        @click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
        @wraps(run)
        def command(folder: Path) -> None:
            try:
                if not is_root(folder):
                    raise click.ClickException(f"{folder} is no folder of --kv-disk-path.")
                run(folder)
            except OSError as error:
                raise click.ClickException(f"{error.filename or folder} cannot be used: {error.strerror}.") from error

        return command

    return decorate


@_command("list")
def list_command(folder: Path) -> None:
    """Show what the folder DIR holds, by model: blocks, tokens, bytes, and when they were used last."""
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


@_command("verify")
def verify_command(folder: Path) -> None:
    """Read every block in the folder DIR and compare it with its hash. Exit code 1 if one is damaged."""
    num_files, damaged = 0, []
    for block in scan(folder, time.time()):
        with suppress(FileNotFoundError):
            why = why_damaged(folder, block)
            num_files += 1
            if why is not None:
                damaged.append(f"{block.path}: {why}")
    for line in damaged[:_MOST_SHOWN]:
        click.echo(line)
    click.echo(f"{num_files:,} files, {len(damaged):,} damaged.")
    if damaged:
        sys.exit(1)


@_command("clear")
def clear_command(folder: Path) -> None:
    """Remove all blocks of the folder DIR, of all models and keys. A service that uses it goes on."""
    click.echo(f"{clear(folder):,} blocks removed.")
