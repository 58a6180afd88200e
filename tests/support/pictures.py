"""The pictures of the README, made from a running demo and from figures that docs/benchmarks/README.md has.

`python -m tests.support.pictures` writes chat.png, dashboard.png and speed.png to docs/images. It needs a Chromium.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.own_service import own_service
from tests.support.browser import Browser, chromium, find_chromium

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images"
FIGURES = ROOT / "docs" / "benchmarks" / "README.md"
_QUESTIONS = ("What is the capital of France?", "Write a haiku about the sea.")
_ANSWER_S = 240.0
_PROMPT = "You are the assistant of a small library and answer in one short paragraph. " * 12
_TOPICS = ("the sea", "old maps", "bees", "bridges", "salt", "lighthouses", "rivers", "ink")
# The beginnings of loads in the first table of docs/benchmarks/README.md, with the names that their bars have.
_LOADS = {
    "one stream, 96 tokens": "one stream",
    "16 streams, 64 tokens each": "16 streams together",
    "8 agents": "8 agents with a shared prompt",
}
# Columns of that table, and the colours of their bars.
_SERVERS = {
    "moeserve, int8": (2, "#0b7a75"),
    "moeserve, float32": (3, "#6cb8b0"),
    "vLLM-CPU, float32": (4, "#c98b2b"),
    "llama.cpp, Q8_0": (5, "#9aa5b1"),
}


def main() -> int:
    """Write all pictures; return the exit code."""
    program = find_chromium()
    if program is None:
        print("There is no Chromium: apt-get install chromium-headless-shell", file=sys.stderr)
        return 1
    draw_speed(read_speeds(FIGURES.read_text(encoding="utf-8")), FOLDER / "speed.png")
    with (
        own_service(["--kv-disk-path", "none"]) as url,
        tempfile.TemporaryDirectory() as folder,
        chromium(program, Path(folder)) as browser,
    ):
        picture_chat(browser, url, FOLDER / "chat.png")
        picture_dashboard(browser, url, FOLDER / "dashboard.png")
    return 0


def read_speeds(document: str) -> dict[str, list[float]]:
    """Return the tokens per second of each server, one for each of `_LOADS`. Raise SystemExit where one is missing."""
    speeds: dict[str, list[float]] = {name: [] for name in _SERVERS}
    load = ""
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        load = cells[0] or load
        if load.startswith(tuple(_LOADS)) and len(cells) > len(_SERVERS) + 1 and cells[1].startswith("tokens/s"):
            for name, (column, _) in _SERVERS.items():
                speeds[name].append(float(cells[column]))
    if any(len(found) != len(_LOADS) for found in speeds.values()):
        raise SystemExit(f"docs/benchmarks/README.md does not have the figures of {', '.join(_LOADS)}.")
    return speeds


def draw_speed(speeds: dict[str, list[float]], file: Path) -> None:
    """Draw the tokens per second beside peers as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 2.8), dpi=110)
    for place, (name, (_, colour)) in enumerate(_SERVERS.items()):
        at = [load + 0.21 * (place - 1.5) for load in range(len(_LOADS))]
        bars = axes.bar(at, speeds[name], 0.2, label=name, color=colour)
        axes.bar_label(bars, fmt="%g", fontsize=8, padding=1)
    axes.set_xticks(range(len(_LOADS)), list(_LOADS.values()))
    axes.set_ylabel("tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("The demo on two cores of an AMD EPYC (docs/benchmarks/README.md)", fontsize=9)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def picture_chat(browser: Browser, url: str, file: Path) -> None:
    """Ask two questions on the chat page, where the second finds the first cached, and keep the page."""
    page = browser.page(1000, 620)
    page.open(url)
    # The demo may go on for long.
    page.evaluate("localStorage.setItem('moeserve.settings', JSON.stringify({max_tokens: '60', temperature: '0'}))")
    page.open(f"{url}/?")
    page.wait("document.querySelector('#model-name').textContent")
    page.click("#question")
    for number, question in enumerate(_QUESTIONS, start=1):
        page.type(question)
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.message.assistant .badge').length === {number}", _ANSWER_S)
    page.screenshot(file)


def picture_dashboard(browser: Browser, url: str, file: Path) -> None:
    """Keep the dashboard while agents that share a prompt are answered."""
    page = browser.page(1000, 1080)
    page.open(f"{url}/dashboard")
    with ThreadPoolExecutor(len(_TOPICS)) as pool:
        for topic in _TOPICS:
            pool.submit(ask, url, topic)
        shown = "Number(document.querySelector('#{} .big').textContent)"
        page.wait(f"{shown.format('requests')} > 6 && {shown.format('generation')} > 20", _ANSWER_S)
        page.wait("['ttft', 'hits'].every((id) => /^[0-9]/.test(document.querySelector(`#${id} .big`).textContent))")
        page.screenshot(file)


def ask(url: str, topic: str) -> None:
    """Have the demo write a little about a topic."""
    messages = [{"role": "system", "content": _PROMPT}, {"role": "user", "content": f"Tell me about {topic}."}]
    body = {"model": "demo", "messages": messages, "max_tokens": 160, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
