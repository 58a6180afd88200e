"""The `moeserve demo` group."""

from __future__ import annotations

import click

from launcher.lazy_group import LazyGroup

_COMMANDS = {"build": ("launcher.demo_build:build", "Build a variant of the demo model.")}


@click.group(cls=LazyGroup, entries=_COMMANDS)
def demo() -> None:
    """Build variants of the demo model."""
