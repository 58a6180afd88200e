"""`moeserve top`: the live figures of a running server in the terminal."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.savings import period
from launcher.server_client import open_url, read_events, server_option

# The server says something every ten seconds.
_SILENCE_S = 30.0
_KEPT_SAMPLES = 300
_LEVELS = " ▁▂▃▄▅▆▇█"
_BAR_WIDTH = 28
_WIDEST_LINE = 60


@click.command()
@server_option
@click.option("--api-key", envvar="MOESERVE_API_KEY", help="A key with the role metrics or admin. [MOESERVE_API_KEY]")
@click.option("--once", is_flag=True, help="Print once and exit (the default when piped).")
def top(url: str, api_key: str | None, once: bool) -> None:
    """Watch a running server: requests, throughput, latencies, KV memory, experts. Ctrl-C ends."""
    console = Console(highlight=False)
    try:
        frames = _frames(url, api_key)
        if once or not console.is_terminal:
            console.print(next(frames).render(console.width))
            return
        with Live(console=console, screen=True, auto_refresh=False) as display:
            for frame in frames:
                display.update(frame.render(console.width), refresh=True)
    except KeyboardInterrupt:
        return
    raise click.ClickException("The server ended the stream.")


@dataclass
class Frame:
    """All that is known at one moment. about: facts; samples: as `moeserve.frontend.live` makes them, oldest first."""

    url: str
    about: dict[str, Any]
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))

    def render(self, width: int) -> RenderableType:
        """Return the figures for a terminal of `width` columns."""
        sample = self.samples[-1]
        table, prompts = self._lines(width), _prompts(sample)
        return Group(self._head(), Text(), table, Text(), *prompts, self._blocks(sample), *_experts(sample))

    def _head(self) -> Text:
        about = self.about
        facts = [*about["models"][:1], about.get("device"), about.get("dtype"), self.url]
        state = "" if about["ready"] else "  the model is loading"
        words = escape(" · ".join(str(fact) for fact in facts if fact))
        return Text.from_markup(f"[bold]moeserve[/] {about['version']}  [dim]{words}{state}[/]")

    def _lines(self, width: int) -> Table:
        now = self.samples[-1]
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", style="bold", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(style="cyan", no_wrap=True)
        rows: list[tuple[str, str, str, list[float | None]]] = [
            ("running", str(now["running"]), f"{now['waiting']} waiting", self._series("running")),
            (
                "generated",
                f"{now['generation_rate']:.1f}/s",
                f"step {_seconds(now['step_seconds'])}",
                self._series("generation_rate"),
            ),
            (
                "prompts",
                f"{now['prompt_rate']:.1f}/s",
                f"{now['cached_rate']:.1f}/s cached",
                self._series("prompt_rate"),
            ),
            self._latency("first token", "ttft"),
            self._latency("between tokens", "inter_token"),
            ("hit rate", _percent(now["hit_rate"]), "of prompt tokens", self._series("hit_rate")),
            ("refused", str(now["rejections"]), f"{now['preemptions']} preempted", []),
        ]
        # Values are never cut: the bars take what is left of the line.
        taken = sum(max(len(row[column]) for row in rows) + 2 for column in range(3))
        for name, value, more, series in rows:
            table.add_row(name, value, more, sparkline(series, min(_WIDEST_LINE, max(0, width - taken))))
        return table

    def _latency(self, name: str, key: str) -> tuple[str, str, str, list[float | None]]:
        now = self.samples[-1][key] or {"p50": None, "p95": None}
        series = [sample[key] and sample[key]["p50"] for sample in self.samples]
        return name, _seconds(now["p50"]), f"p95 {_seconds(now['p95'])}", series

    def _series(self, key: str) -> list[float | None]:
        return [sample[key] for sample in self.samples]

    def _blocks(self, sample: dict[str, Any]) -> Text:
        """Return a bar of the KV blocks by state, and the tokens in the tiers below."""
        kv = sample["kv"]
        total = max(1, sum(kv.values()))
        widths = {state: round(_BAR_WIDTH * kv[state] / total) for state in ("leased", "cached")}
        bar = Text("KV blocks  ", style="dim")
        bar.append("█" * widths["leased"], "green").append("█" * widths["cached"], "blue")
        bar.append("·" * max(0, _BAR_WIDTH - sum(widths.values())), "dim")
        size = self.about.get("block_size", 1)
        for state, colour in (("leased", "green"), ("cached", "blue"), ("free", "dim")):
            bar.append(f"  {state} ", colour).append(f"{kv[state] * size:,}", "bold")
        for below in sample["below"]:
            where = "in host memory" if below["tier"] == "host" else "on disk"
            bar.append(f"  {where} ").append(f"{below['blocks'] * size:,}", "bold")
        return bar.append(" tokens", "dim")


def _prompts(sample: dict[str, Any]) -> Iterator[Text]:
    """Yield a line about the prompts that are being computed, and one about the latest that was."""
    if now := sample.get("prompts"):
        done = f"{now['tokens'] - now['left']:,} of {now['tokens']:,} ({now['cached']:,} cached)"
        many = f" of {now['requests']} prompts" if now["requests"] > 1 else ""
        left = f" · {period(now['seconds_left'])} left"
        yield Text("computing  ", style="dim").append(done, "bold").append(many).append(left, "cyan")
    if latest := sample.get("latest_prompt"):
        line = Text("last one   ", style="dim").append(f"{latest['cached']:,} of {latest['tokens']:,} cached", "bold")
        line.append(f" · {period(latest['seconds'])}")
        if sample["saved_seconds"]:
            line.append(f" · saved {period(sample['saved_seconds'])} today", "cyan")
        yield line


def _experts(sample: dict[str, Any]) -> Iterator[Text]:
    """Yield a line about the experts if the server tells anything of them."""
    experts = sample["experts"]
    named = {
        "balance of the worst layer": experts["balance"] and f"{experts['balance']:.2f}",
        "in memory": experts["resident"],
        "hits": experts["hit_rate"] and _percent(experts["hit_rate"]),
        "stalled": experts["stall_seconds"] and _seconds(experts["stall_seconds"]),
        "layers placed anew": experts["migrations"],
    }
    known = [f"{name} [bold]{value}[/]" for name, value in named.items() if value is not None]
    if known:
        yield Text.from_markup("[dim]experts[/]    " + "  ".join(known))


def _frames(url: str, api_key: str | None) -> Iterator[Frame]:
    """Yield a frame for every sample, from the first on that is there. Raise ServerError."""
    with open_url(f"{url}/v1/stats/stream", None, api_key, _SILENCE_S) as response:
        frame = Frame(url, {})
        for name, data in read_events(response):
            content = json.loads(data)
            if name == "stats":
                frame.about = content["about"]
                frame.samples.extend(content["samples"])
            elif name == "sample":
                frame.samples.append(content)
            if frame.samples:
                yield frame


def sparkline(series: Sequence[float | None], width: int = 40) -> str:
    """Return the latest values as bars against the greatest of them; a space where there is none."""
    latest = series[-width:]
    most = max((value for value in latest if value is not None), default=0.0)
    top = len(_LEVELS) - 1
    return "".join(
        _LEVELS[0] if value is None else _LEVELS[max(1, round(top * value / most)) if most else 1] for value in latest
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
