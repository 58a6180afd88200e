"""`moeserve experts deepnvme`: compile the faster reader of experts, once per environment."""

from __future__ import annotations

import click
from rich.console import Console

from experts.errors import DeepNvmeError
from experts.memory.deep_nvme import compile_deep_nvme


@click.command()
def deepnvme() -> None:
    """Compile DeepNVMe, through which --expert-memory then reads experts faster; it takes minutes, once.

    It needs libaio with its headers (libaio-dev) and a C++ compiler.
    """
    try:
        with Console(stderr=True).status("compiling"):
            library = compile_deep_nvme()
    except DeepNvmeError as error:
        raise click.ClickException(str(error)) from None
    click.echo(library)
