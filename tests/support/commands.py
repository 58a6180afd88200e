"""Runs `moeserve` commands in this process, on machines that have the library they are made with."""

from __future__ import annotations

from typing import Any

import pytest


def invoke(*arguments: str) -> Any:
    """click's result of `moeserve ARGUMENTS`."""
    testing = pytest.importorskip("click.testing", reason="a GPU machine may not have the command's library")
    from launcher.cli import main

    return testing.CliRunner().invoke(main, list(arguments))
