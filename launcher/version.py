"""`moeserve version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import click

from moeserve.version import VERSION

_REPORTED = ("torch", "triton", "deepspeed", "transformers", "pyzmq", "starlette", "uvicorn")


@click.command()
def version() -> None:
    """Print the versions of moeserve and of what it runs on."""
    click.echo(f"moeserve {VERSION}")
    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _REPORTED:
        try:
            click.echo(f"{name} {installed_version(name)}")
        except PackageNotFoundError:
            click.echo(f"{name} is not installed")
