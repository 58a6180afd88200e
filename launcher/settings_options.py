"""The options of `moeserve serve`, made out of the fields of `ServeConfig`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import click

from moeserve.config import ServeConfig, environment_name, flag_name, value_type
from moeserve.settings.quantities import exact_size, parse_size

_F = TypeVar("_F", bound=Callable[..., Any])
_ARGUMENT = "model"


# The words for flags of other servers, by their names: the flag that does the same here.
_FLAGS_OF_OTHERS = {
    **dict.fromkeys(("--ctx-size", "-c", "--context-length", "--max-total-tokens"), "--max-model-len sets the context"),
    **dict.fromkeys(("--model", "-m", "--model-path", "--model-id", "-hf", "--hf-repo"), "MODEL is the first argument"),
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "--tensor-parallel-size N is for heads, channels and experts"),
    **dict.fromkeys(("-pp", "--pp-size", "-sm", "--split-mode"), "--pipeline-parallel-size N is for layers"),
    **dict.fromkeys(("--ep-size", "--enable-expert-parallel"), "--expert-parallel-size N is for experts"),
    **dict.fromkeys(("-t", "--threads-batch"), "--threads sets the cores"),
    **dict.fromkeys(("-np", "--parallel", "--max-running-requests"), "--max-num-seqs bounds requests at once"),
    **dict.fromkeys(("--chunked-prefill-size", "--batch-size", "-b"), "--max-num-batched-tokens bounds a step"),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), "a model is whole on one device, see --device"),
    **dict.fromkeys(("--n-cpu-moe", "--cpu-moe", "--cpu-offload-gb"), "--expert-memory keeps a part of the experts"),
    **dict.fromkeys(("--mem-fraction-static", "--cache-ram"), "--kv-cache-memory is for keys and values"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "--kv-cache-dtype is for keys and values"),
    **dict.fromkeys(("--alias", "-a"), "--served-model-name names the model for clients"),
    **dict.fromkeys(("--enable-auto-tool-choice", "--jinja"), "calls of tools are always read"),
    **dict.fromkeys(("--expert-quantization",), "--quantization experts=FORM rounds the experts alone"),
    **dict.fromkeys(("--trust-remote-code",), "code of a model's repository is never run"),
}


# The settings in `--help`.
_USUAL = frozenset(
    (
        *(
            "api_key_file",
            "device",
            "expert_memory",
            "host",
            "kv_cache_memory",
            "kv_disk_path",
            "max_model_len",
            "port",
        ),
        *("quantization", "served_model_name", "sleep_after"),
    )
)
_SHOWS_ALL = "moeserve.shows_all_settings"


def _help_all(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_help_all,
    help="Show all settings and exit.",
)


class ServeCommand(click.Command):
    """A command whose `--help` shows the usual settings and `--help-all` every one; it knows flags of other servers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # Of a short option with several letters, such as `-ngl`, the error names a letter.
            names = [arg.partition("=")[0] for arg in (error.option_name, *given)]
            name = next((name for name in names if name in _FLAGS_OF_OTHERS), None)
            if name is None:
                raise
            raise click.UsageError(f"No such option: {name}. Here {_FLAGS_OF_OTHERS[name]}.", ctx) from None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        by_name = {option.name: option for option in options}
        settings = [setting for setting in fields(ServeConfig) if setting.name != _ARGUMENT]
        if not ctx.meta.get(_SHOWS_ALL):
            hidden = {setting.name for setting in settings} - _USUAL
            shown = [option for name, option in by_name.items() if name not in hidden]
            _write_section("Options", shown, ctx, formatter)
            return
        for heading, group in groupby(settings, key=lambda setting: str(setting.metadata["group"])):
            _write_section(heading, [by_name.pop(setting.name) for setting in group], ctx, formatter)
        _write_section("Other", list(by_name.values()), ctx, formatter)


def settings_options(command: _F) -> _F:
    """Add the MODEL argument, one option per setting and `--config FILE` to a command.

    Values stay text (switches: bool): `load_config` converts them, the same way for every source.
    """
    command = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="TOML file with these settings.",
    )(command)
    for setting in reversed(fields(ServeConfig)):
        if setting.name != _ARGUMENT:
            command = _option(setting)(command)
    return click.argument(_ARGUMENT, required=False)(command)


def some_settings(*names: str) -> Callable[[_F], _F]:
    """Return a decorator that adds the options of the named settings to a command; see `settings_options`."""

    def add(command: _F) -> _F:
        for setting in reversed(fields(ServeConfig)):
            if setting.name in names:
                command = _option(setting)(command)
        return command

    return add


def _read_sets(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Return settings of the form NAME=VALUE as `load_config` takes flags."""
    known = {setting.name: setting for setting in fields(ServeConfig) if setting.name != _ARGUMENT}
    flags: dict[str, Any] = {}
    for text in given:
        name, is_set, value = text.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not is_set or name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close and close[0] != name else "."
            raise click.BadParameter(f"{text!r} is not NAME=VALUE with a setting of `moeserve serve`{hint}")
        flags[name] = [*flags.get(name, ()), value] if known[name].metadata.get("multiple") else value
    return flags


set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    callback=_read_sets,
    metavar="NAME=VALUE",
    help="Setting of `moeserve serve` for that service, as kv-cache-memory=12GiB. May be given several times.",
)


def serve_arguments(flags: Mapping[str, Any], config: ServeConfig | None = None) -> list[str]:
    """Return settings as arguments of `moeserve serve`; a list repeats a flag, None leaves it out.

    config: the settings that the flags make, where switches among them are text.
    """
    words = []
    for name, given in flags.items():
        flag, value = "--" + name.replace("_", "-"), given if config is None else getattr(config, name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif given is not None:
            words += [f"{flag}={text}" for text in (given if isinstance(given, list | tuple) else [given])]
    return words


def _option(setting: Field[Any]) -> Callable[[_F], _F]:
    flag, kind, metadata = flag_name(setting), value_type(setting), setting.metadata
    text = f"{metadata['help']}{_default_note(setting)} [{environment_name(setting)}]"
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", setting.name, default=None, help=text)
    if "choices" in metadata:
        metavar = "|".join(metadata["choices"])
    elif metadata.get("parse") is parse_size:
        metavar = "SIZE"
    else:
        metavar = metadata.get("metavar") or {int: "N", float: "SECONDS", str: "TEXT"}[kind]
    multiple = bool(metadata.get("multiple"))
    return click.option(flag, setting.name, default=None, multiple=multiple, metavar=metavar, help=text)


def _default_note(setting: Field[Any]) -> str:
    if setting.metadata.get("multiple"):
        return " May be given several times."
    if setting.default is None:
        return ""
    shown = {True: "on", False: "off"}.get(setting.default) if isinstance(setting.default, bool) else setting.default
    if setting.metadata.get("parse") is parse_size:
        shown = exact_size(getattr(ServeConfig, setting.name))
    on_gpu = f"; {setting.metadata['on_gpu']} on a GPU" if "on_gpu" in setting.metadata else ""
    return f" (default: {shown}{on_gpu})"


def _write_section(
    heading: str, options: list[click.Option], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(heading):
            formatter.write_dl(records)
