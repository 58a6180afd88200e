"""The `moeserve` command and its groups, whose commands are imported when they are called."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import click

from moeserve.config import VERSION, ConfigError
from moeserve.engine.curve import create_keys

_REPORTED = ("torch", "triton", "deepspeed", "transformers", "pyzmq", "starlette", "uvicorn")


class LazyGroup(click.Group):
    """A group that imports a command when it is called, so that `--help` costs nothing.

    entries: by name, where the command is (`module:attribute`) and its line in the list of commands.
    """

    def __init__(self, *args: Any, entries: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._entries:
            return None
        module, attribute = self._entries[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._entries.items()])


@click.group(
    cls=LazyGroup,
    entries={
        "serve": ("launcher.serve:serve", "Serve a model over HTTP until stopped."),
        "run": ("launcher.chat:run", "Serve a model and talk to it in the terminal."),
        "chat": ("launcher.chat:chat", "Talk to a running server from the terminal."),
        "launch": ("launcher.launch:launch", "Start a terminal agent (codex, claude, opencode, ...) over a server."),
        "list": ("launcher.model_list:list_models", "List the fetched models, and whether they fit this machine."),
        "ps": ("launcher.running:ps", "List the services that run."),
        "stop": ("launcher.running:stop", "Stop a service that runs."),
        "top": ("launcher.top:top", "Watch a running server in the terminal."),
        "run-batch": ("launcher.run_batch:run_batch", "Answer a file of requests."),
        "bench": ("launcher.cli:bench", "Measure servers, and weights of fewer bits."),
        "curve-key": ("launcher.cli:curve_key", "Make the key that several nodes of one service share."),
        "experts": ("launcher.cli:experts", "Record and plot expert routing; fit predictors of it."),
        "cache": ("launcher.cli:cache", "See, check and empty a folder of KV or of expert files."),
        "doctor": ("launcher.doctor:doctor", "Say what a model is, what fits into this machine, and with which flags."),
        "key": ("launcher.cli:key", "Make keys for the people who use a server."),
        "check": ("launcher.check:check", "Check what this machine computes, and print a report."),
        "pull": ("launcher.model_files:pull", "Fetch a model of the hub before it is served."),
        "verify": ("launcher.model_files:verify_command", "Compare a model folder with its recorded hashes."),
        "demo": ("launcher.cli:demo", "Build variants of the demo model."),
        "version": ("launcher.cli:version", "Print the versions of moeserve and of the libraries under it."),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION, "-V", "--version", message="moeserve %(version)s")
def main() -> None:
    """Inference service for mixture-of-experts language models."""


@click.group(
    cls=LazyGroup,
    entries={
        "serve": ("moeserve.bench.serve:command", "Measure OpenAI-compatible servers under load, side by side."),
        "decode": ("moeserve.bench.decode:command", "Time the products of a step on this CPU, by format of weights."),
        "quality": ("moeserve.bench.quality:command", "Compare the perplexity of a model by format of weights."),
    },
)
def bench() -> None:
    """Measure servers under load, and what weights of fewer bits cost and gain."""


@click.group(
    cls=LazyGroup,
    entries={
        "trace": ("launcher.experts_commands:trace", "Record a routing trace of a running server."),
        "fit": ("launcher.experts_commands:fit", "Fit gates to a model, to load its experts ahead by."),
        "report": ("launcher.experts_commands:report", "Draw load, affinity and balance from a file."),
    },
)
def experts() -> None:
    """Record and plot expert routing; fit predictors of it."""


@click.group(
    cls=LazyGroup,
    entries={
        "list": ("launcher.cache_commands:list_command", "Show what a folder holds, by model."),
        "verify": ("launcher.cache_commands:verify_command", "Compare every file with its hash."),
        "clear": ("launcher.cache_commands:clear_command", "Remove all blocks, or all expert files."),
    },
)
def cache() -> None:
    """See, check and empty a folder of --kv-disk-path or of --expert-store-dir."""


@click.group(cls=LazyGroup, entries={"new": ("launcher.keys:new", "Print the line of a new key.")})
def key() -> None:
    """Make keys for the people who use a server (--api-key-file)."""


@click.group(cls=LazyGroup, entries={"build": ("launcher.cli:build_demo", "Build a variant of the demo model.")})
def demo() -> None:
    """Build variants of the demo model."""


@click.command(name="build")
@click.option("--split", is_flag=True, help="Make experts out of split neurons, not in tied groups.")
@click.option("--experts", type=click.IntRange(min=1), help="Experts per layer.  [default: 8, with --split 16]")
@click.option("--top-k", type=click.IntRange(min=1), default=2, show_default=True, help="Experts a token chooses.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder; the cache unless given.")
def build_demo(split: bool, experts: int | None, top_k: int, out: Path | None) -> None:
    """Build the demo model with other numbers of experts and print its folder.

    Experts come in tied groups. A token chooses one group, so the model computes the same as the dense one. With
    --split they do not, and the model is worse than the dense one; the perplexity of both is printed.
    """
    from launcher.console import shown_progress
    from moeserve.model.demo import SPLIT_EXPERTS, ensure_demo, ensure_split_demo, read_quality

    with shown_progress() as progress:
        ensure, usual = (ensure_split_demo, SPLIT_EXPERTS) if split else (ensure_demo, 8)
        folder = ensure(experts=experts or usual, top_k=top_k, out=out, progress=progress)
    click.echo(str(folder))
    if split:
        quality = read_quality(folder)
        click.echo(
            f"perplexity {quality.split:.2f}, of the dense model {quality.dense:.2f} "
            f"({quality.tokens} tokens of {quality.text})"
        )


@click.command()
def version() -> None:
    """Print the versions of moeserve and of the libraries under it."""
    click.echo(f"moeserve {VERSION}")
    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _REPORTED:
        try:
            click.echo(f"{name} {installed_version(name)}")
        except PackageNotFoundError:
            click.echo(f"{name} is not installed")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def curve_key(file: Path) -> None:
    """Write a new key to FILE, which only its owner may read. Copy it to every node (--curve-key-file)."""
    try:
        create_keys(file)
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    click.echo(f"The key is in {file}: copy it to every node by a safe way, and give --curve-key-file there.")


if __name__ == "__main__":
    main(prog_name="moeserve")
