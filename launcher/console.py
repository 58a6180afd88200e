"""The terminal output of `moeserve serve`: progress bars and the ready banner."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from moeserve.model.demo import SENTENCE
from moeserve.model.spec import ModelError
from moeserve.model.spec import Progress as Progressed
from moeserve.settings.quantities import show_size
from moeserve.statuses import Ready


class ProgressDisplay:
    """Shows one bar per stage on a terminal; elsewhere one line when a stage begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._stage: str | None = None
        self._task: TaskID | None = None

    def update(self, stage: str, done: int, total: int) -> None:
        """Show `done` of `total`; total 0 means that the amount of work is not known."""
        if stage != self._stage:
            self._begin(stage)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total or None)

    def close(self) -> None:
        """End the display; its last state stays on the terminal."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = self._stage = None

    def _begin(self, stage: str) -> None:
        self._stage = stage
        if not self._console.is_terminal:
            self._console.print(escape(stage), highlight=False)
            return
        if self._progress is None:
            # The bar fills the rest of the line.
            self._progress = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None),
                _Amount(table_column=Column(no_wrap=True)),
                TimeElapsedColumn(),
                console=self._console,
                expand=True,
            )
            self._progress.start()
        self._task = self._progress.add_task(escape(stage), total=None)


@contextmanager
def shown_progress() -> Iterator[Progressed]:
    """Show the progress of a command about a model. A ModelError ends the process with its sentence and exit code 1."""
    display = ProgressDisplay(Console(stderr=True, soft_wrap=True))
    try:
        yield display.update
    except ModelError as error:
        display.close()
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    finally:
        display.close()


class _Amount(MofNCompleteColumn):
    """`3/8` for counts, `1.2 GiB/3.4 GiB` for bytes, which are recognised by their size; nothing without a total."""

    def render(self, task):  # type: ignore[no-untyped-def]
        if task.total is None:
            return Text("")
        if task.total < 2**20:
            return super().render(task)
        return TextColumn(f"{show_size(int(task.completed))}/{show_size(int(task.total))}").render(task)


def ready_banner(
    ready: Ready,
    *,
    url: str,
    model: str,
    needs_key: bool,
    gpus: list[str],
    is_demo: bool = False,
    disk: str | None = None,
) -> str:
    """Return the text that says where the service is, how to try it, and how much memory it took.

    disk: where and how much KV is kept on disk.
    """
    tokens = ready.num_blocks * ready.block_size
    absence = ready.no_compiled_kernels
    rows = (
        ("demo", SENTENCE if is_demo else None),
        ("model", ready.model),
        ("device", f"{ready.device}, {ready.arithmetic or ready.dtype}"),
        ("weights", show_size(ready.weights_bytes)),
        ("KV", f"{show_size(ready.kv_bytes)} = {tokens:,} tokens in {ready.num_blocks:,} blocks"),
        ("windows", _windows(ready)),
        ("states", _states(ready)),
        ("context", _context(ready)),
        ("disk", disk),
        ("answers", _answers(ready)),
        ("kernels", ready.kernels),
        ("kernels", absence and f"torch, several times slower than compiled ones. {absence}"),
        ("GPU", f"{gpus[0]} found, not used" if gpus and not ready.device.startswith("cuda") else None),
    )
    head = [f"moeserve is ready on {url}", "", _curl_line(url, model, needs_key=needs_key), ""]
    return "\n".join([*head, *(f"  {name:<8} {text}" for name, text in rows if text is not None)])


def _windows(ready: Ready) -> str | None:
    if not ready.num_window_blocks:
        return None
    return f"{ready.num_window_blocks:,} blocks of the KV for layers that see the last {ready.window:,} tokens"


def _states(ready: Ready) -> str | None:
    if not ready.state_row_bytes:
        return None
    size, each = ready.state_row_bytes * (ready.num_state_slots + ready.num_snapshots), show_size(ready.state_row_bytes)
    counts = f"{ready.num_state_slots} requests at once and {ready.num_snapshots} snapshots of prefixes"
    return f"{show_size(size)} = {counts}, {each} each"


def _context(ready: Ready) -> str:
    longest, tokens = ready.model_max_len, ready.num_blocks * ready.block_size
    text = f"{ready.max_model_len:,} tokens per request"
    if longest is not None and longest > ready.max_model_len:
        text += f" of the model's {longest:,}"
        # A window's layers keep fewer tokens, so the bytes of a longer context are not in proportion.
        if ready.max_model_len == tokens and not ready.num_window_blocks:
            needed = show_size(-(-longest * ready.kv_bytes // tokens), up=True).replace(" ", "")
            text += f": --kv-cache-memory {needed} holds them all"
    short = ready.short_context
    if short is not None and ready.max_model_len > short:
        text += f"; positions are stretched, as --max-model-len is beyond {short:,}"
    elif short is not None:
        text += f"; --max-model-len beyond {short:,} stretches positions"
    return text


def _answers(ready: Ready) -> str | None:
    """Return the bounds of answers, None if there are none."""
    longest, default = ready.longest_answer, ready.default_max_tokens
    if longest is not None:
        return f"at most {longest:,} tokens (--override-generation-config)"
    if default is None:
        return None
    return f"{default:,} tokens where the request sets no max_tokens (--default-max-tokens)"


def _curl_line(url: str, model: str, *, needs_key: bool) -> str:
    key = ' -H "Authorization: Bearer $MOESERVE_API_KEY"' if needs_key else ""
    body = (
        f'{{"model": "{model}", "stream": true, "max_tokens": 64, '
        '"messages": [{"role": "user", "content": "What is a mixture of experts?"}]}'
    )
    return f"curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
