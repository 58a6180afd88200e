"""`python -m benchmarks.drafts`: what draft tokens gain on this machine's CPU, by kind of text and number of streams.

A model generates the same texts without drafts, with all drafts (`suffix`) and with drafts that are likely to pay
(`auto`), or with other methods; the methods take turns at going first. One scheduler per method serves all texts, so
`auto` learns as it does in a service. Prompts are computed before the clock runs. The tokens must be the same with all
methods. Of a random model, only kinds that do not depend on what a model has learnt mean something: an agent's second
run and predicted edits. Texts for a GGUF file are encoded by the demo's tokenizer.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import click
from tokenizers import Tokenizer

from benchmarks.constrained import SCHEMA
from benchmarks.token_engine import advance
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_caches, build_drafts, build_scheduler, build_text_parts
from moeserve.engine.rank import Rank
from moeserve.frontend.dialects.formats import constraint_of, of_calls
from moeserve.frontend.dialects.internal import OutputFormat, Tool
from moeserve.frontend.parsers.call_grammars import call_grammar
from moeserve.grammars.masks import GrammarMasks
from moeserve.model.demo import ensure_demo
from moeserve.model.files import is_gguf_folder
from moeserve.model.source import resolve_model
from moeserve.plan import Asked, Request, SamplingParams
from moeserve.scheduling.drafting import Drafting
from moeserve.scheduling.grammars import Drafts
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import LocalExecutor, Steps
from moeserve.settings.drafts import parse_speculative

NONE = "none"
ROOT = Path(__file__).parent.parent
# Files of the repository whose text is edited, a stream each, over and over.
_EDITED = sorted(Path(ROOT / "radix_cache").glob("*.py"))
_SHOWN_CHARS = 1200  # of a file in a prompt
_BETWEEN_EDITS = 32  # tokens of a predicted answer
_TRACE = [
    "You are an agent. List the files of the project.",
    "Read the configuration and say which port it names.",
    "The test fails with an index error. Explain the cause.",
    "Write a function that returns the median of a list.",
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of text: its prompts, how it is sampled, and the facts that are known about its answers.

    is_second_run: the same requests have been served once before. is_predicted: the client sends the answer with a few
    edits, as it would send a file to have it changed.
    """

    prompt: Callable[[int], str]
    sampling: SamplingParams
    is_second_run: bool = False
    is_predicted: bool = False


def code_edit(number: int) -> str:
    """Return a file, and the beginning of the same file after an edit of its first line."""
    text = _EDITED[number % len(_EDITED)].read_text()[:_SHOWN_CHARS]
    return (
        f'{text}\n\n# The same file with another first line:\n\n"""Edited.\n'
        + text[text.index("\n") : _SHOWN_CHARS // 4]
    )


def json_echo(number: int) -> str:
    """Return settings of the service as JSON, and the beginning of the same JSON."""
    settings = list(asdict(ServeConfig()).items())
    draw = Random(number)
    text = json.dumps([{"name": name, "value": str(value)} for name, value in draw.sample(settings, 20)], indent=1)
    return f"Input:\n{text}\nOutput, the same:\n{text[: len(text) // 4]}"


def tool(name: str, **properties: dict[str, Any]) -> Tool:
    """Return a tool with these arguments, all of them required."""
    return Tool(name, None, {"type": "object", "properties": properties, "required": list(properties)})


# Tools as agents have them. A random model ends no text by itself, so texts are bounded.
_TOOLS = [
    tool(
        "edit_file",
        file_path={"type": "string", "maxLength": 32},
        old_string={"type": "string", "maxLength": 48},
        new_string={"type": "string", "maxLength": 48},
        replace_all={"type": "boolean"},
    ),
    tool(
        "search_files",
        pattern={"type": "string", "maxLength": 24},
        directory={"type": "string", "maxLength": 24},
        output_mode={"enum": ["content", "files_with_matches", "count"]},
        case_sensitive={"type": "boolean"},
        max_results={"type": "integer", "minimum": 1, "maximum": 100},
    ),
    tool(
        "run_command",
        command={"type": "string", "maxLength": 48},
        timeout_milliseconds={"type": "integer", "minimum": 1000, "maximum": 600_000},
        run_in_background={"type": "boolean"},
    ),
]


def forced_calls(number: int) -> str:
    tools = "\n".join(json.dumps({"name": one.name, "parameters": one.parameters}) for one in _TOOLS)
    return f"Tools:\n{tools}\nTask {number}: rename the variable total in src/part_{number}.py, and run the tests.\n"


def noise(number: int) -> str:
    draw = Random(number)
    return " ".join("".join(draw.choices("abcdefghijklmnop", k=draw.randrange(2, 9))) for _ in range(60))


def edited(tokens: Sequence[int], draw: Random) -> array[int]:
    """Return an answer in which one of about _BETWEEN_EDITS tokens is exchanged, left out or has another one before."""
    text = array("i")
    for token in tokens:
        match draw.randrange(3 * _BETWEEN_EDITS):
            case 0:
                text.append(token + 1)
            case 1:
                text.extend((token + 1, token))
            case 2:
                pass
            case _:
                text.append(token)
    return text


def kinds(num_tokens: int, eos: tuple[int, ...]) -> dict[str, Kind]:
    greedy = SamplingParams(num_tokens, temperature=0.0)
    grammar = constraint_of(OutputFormat("json_schema", SCHEMA)).grammar
    forced = SamplingParams(num_tokens, temperature=0.0, stop_token_ids=eos, grammar=grammar)
    calls = of_calls(call_grammar("hermes", _TOOLS, forced=True, parallel=True, ids={}), None).grammar
    random = SamplingParams(num_tokens, temperature=1.5)
    return {
        "code edit": Kind(code_edit, greedy),
        "JSON echo": Kind(json_echo, greedy),
        "predicted edit": Kind(noise, greedy, is_predicted=True),
        "agent's first run": Kind(lambda n: f"{_TRACE[n % 4]}\nStep {n}:", greedy),
        "agent's second run": Kind(lambda n: f"{_TRACE[n % 4]}\nStep {n}:", greedy, is_second_run=True),
        "forced JSON": Kind(lambda n: f"List the staff of hospital {n} as JSON.", forced),
        "forced calls": Kind(forced_calls, replace(forced, grammar=calls)),
        "unguessable": Kind(noise, random),
    }


@dataclass(slots=True)
class Service:
    """A method's scheduler over the one model. clock: gives seconds. step_s: of each step so far."""

    scheduler: Scheduler
    steps: Steps
    masks: GrammarMasks
    drafts: Drafts
    clock: Callable[[], float]
    num_served: int = 0
    step_s: list[float] = field(default_factory=list)

    def serve(
        self,
        prompts: Sequence[array[int]],
        sampling: SamplingParams,
        namespace: str,
        predicted: Sequence[array[int]] | None = None,
    ) -> list[list[int]]:
        """Return the answers to prompts that are served together. predicted: the answers that the client predicts."""
        found: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            self.num_served += 1
            own = replace(sampling, seed=number)
            found[f"{self.num_served}"] = []
            guess = array("i") if predicted is None else predicted[number]
            self.scheduler.add(Request(f"{self.num_served}", prompt[:], own, namespace, asked=Asked(predicted=guess)))
        while True:
            self.scheduler.set_time(began := self.clock())
            outputs = advance(self.steps, self.masks)
            if outputs is None:
                break
            for output in outputs:
                if output.error is not None:
                    raise click.ClickException(output.error)
                if output.token_id is not None:
                    found[output.request.request_id].append(output.token_id)
            self.scheduler.take_started()
            self.step_s.append(self.clock() - began)
            self.scheduler.count_step(self.step_s[-1])
        return list(found.values())

    @property
    def drafted(self) -> tuple[int, int]:
        """The draft tokens so far, and how many were right."""
        if not isinstance(self.drafts, Drafting):
            return 0, 0
        return self.drafts.counters.tokens, sum(self.drafts.counters.accepted)


@dataclass(slots=True)
class Measured:
    """The runs of one method, kind and number of streams: tokens per second, and per CPU second, of each, and draft
    tokens of all."""

    paces: list[float] = field(default_factory=list)
    cpu_paces: list[float] = field(default_factory=list)
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def acceptance(self) -> str:
        return f"{self.num_accepted / self.num_drafts:.2f} of {self.num_drafts}" if self.num_drafts else "none"


class Bench:
    """One model, with its MTP layer a second time where a method needs that, and a service per method."""

    def __init__(self, folder: Path, most_streams: int, methods: Sequence[str], *, cpu_time: bool = False) -> None:
        """cpu_time: compute on one thread, and let `auto` learn from CPU time, which other programs disturb less."""
        self.methods = methods
        clock = time.process_time if cpu_time else time.perf_counter
        tokenizer = (ensure_demo() if is_gguf_folder(folder) else folder) / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        ranks = dict[bool, Rank]()
        self.services, self._masks = dict[str, Service](), list[GrammarMasks]()
        for method in methods:
            threads = 1 if cpu_time else ServeConfig.threads
            config = ServeConfig(max_num_seqs=2 * most_streams, speculative_config=method, threads=threads)
            predicts = parse_speculative(method).method == "mtp"
            if predicts not in ranks:
                ranks[predicts] = load_rank(folder, plan_model(folder, config), config, lambda _: None).start()
            rank = ranks[predicts]
            caches = build_caches(config, rank.model.kv)
            drafts, eos = build_drafts(config, rank.model.kv), tuple(rank.model.eos_token_ids)
            masks = GrammarMasks(tokenizer, rank.model.spec.vocab_size, eos, most_drafts=drafts.most_forced)
            self._masks.append(masks)
            parts = build_text_parts(masks, drafts)
            scheduler = build_scheduler(config, rank.model.kv, caches, parts=parts)
            steps = Steps(scheduler, LocalExecutor(rank.runner), rank.depth)
            self.services[method] = Service(scheduler, steps, masks, drafts, clock)
        self.eos, self.tokenizer_json, self.vocab_size = eos, tokenizer, rank.model.spec.vocab_size

    def close(self) -> None:
        for masks in self._masks:
            masks.close()

    def prompts(self, kind: Kind, streams: int) -> list[array[int]]:
        return [array("i", self._tokenizer.encode(kind.prompt(number)).ids) for number in range(streams)]

    def run(self, kind: Kind, streams: int, namespace: str, first: int, found: dict[str, Measured]) -> None:
        """Serve a kind of text with every method, beginning with number `first`, and add the times to `found`."""
        prompts = self.prompts(kind, streams)
        answers, predicted = [], None
        if kind.is_predicted:
            draw = Random(first)
            before = self.services[NONE].serve(prompts, kind.sampling, f"{namespace} before")
            predicted = [edited(answer, draw) for answer in before]
        for turn in range(len(self.methods)):
            method = self.methods[(first + turn) % len(self.methods)]
            service, measured = self.services[method], found[method]
            num_before = kind.sampling.max_tokens if kind.is_second_run else 1
            service.serve(prompts, replace(kind.sampling, max_tokens=num_before), namespace)
            drafts, accepted = service.drafted
            began, cpu_began = time.perf_counter(), time.process_time()
            answers.append(service.serve(prompts, kind.sampling, namespace, predicted))
            num_tokens = sum(map(len, answers[-1]))
            measured.paces.append(num_tokens / (time.perf_counter() - began))
            measured.cpu_paces.append(num_tokens / (time.process_time() - cpu_began))
            now_drafts, now_accepted = service.drafted
            measured.num_drafts += now_drafts - drafts
            measured.num_accepted += now_accepted - accepted
        if any(answer != answers[0] for answer in answers):
            raise click.ClickException("Draft tokens have changed the tokens of an answer.")


@click.command()
@click.option("--streams", type=click.IntRange(1), multiple=True, default=(1, 4, 16), show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="To generate in each stream.")
@click.option("--text", "texts", multiple=True, help="A kind of text; all of them unless given.")
@click.option("--model", help="As of `moeserve serve`; the demo unless given.")
@click.option("--method", "others", multiple=True, default=("suffix", "auto"), show_default=True, help="Beside none.")
@click.option(
    "--cpu-time", is_flag=True, help="One thread, and `auto` learns from CPU time: for a machine with other work."
)
@click.option("--seconds", type=click.IntRange(1), default=360, show_default=True, help="No round begins after these.")
def main(
    streams: tuple[int, ...],
    tokens: int,
    texts: tuple[str, ...],
    model: str | None,
    others: tuple[str, ...],
    cpu_time: bool,
    seconds: int,
) -> None:
    """Print the tokens per second with drafts over the tokens per second without, and the share of right drafts."""
    methods = (NONE, *others)
    bench = Bench(resolve_model(model), max(streams), methods, cpu_time=cpu_time)
    table = kinds(tokens, bench.eos)
    if missing := set(texts) - set(table):
        raise click.BadParameter(f"{', '.join(sorted(missing))}: the kinds are {', '.join(table)}")
    first, table = table["code edit"], {name: kind for name, kind in table.items() if not texts or name in texts}
    found = {(name, count): {method: Measured() for method in methods} for name in table for count in streams}
    # The first round only lets caches, kernels and rates of the methods become warm.
    bench.run(first, max(streams), "warm", 0, {method: Measured() for method in methods})
    began, longest, number = time.monotonic(), 0.0, 0
    while not number or time.monotonic() - began + longest < seconds:
        round_began = time.monotonic()
        for (name, count), measured in found.items():
            bench.run(table[name], count, f"{number} {name} {count}", number, measured)
        longest, number = max(longest, time.monotonic() - round_began), number + 1
        click.echo(f"round {number}: {time.monotonic() - round_began:.0f} s", err=True)
    bench.close()
    click.echo(f"Medians of {number} rounds, {tokens} tokens in each stream; of pairs, with their quartiles.\n")
    columns = " | ".join(f"{method} | per CPU second | right" for method in others)
    click.echo(f"| text | streams | tokens/s without | per CPU second | {columns} |")
    click.echo("|---" * (4 + 3 * len(others)) + "|")
    for (name, count), measured in found.items():
        base = measured[NONE]
        cells = [name, str(count), f"{statistics.median(base.paces):.1f}", f"{statistics.median(base.cpu_paces):.1f}"]
        for method in others:
            own = measured[method]
            cells += [shown(own.paces, base.paces), shown(own.cpu_paces, base.cpu_paces), own.acceptance]
        click.echo("| " + " | ".join(cells) + " |")


def shown(paces: Sequence[float], base: Sequence[float]) -> str:
    """Return the median of the ratios of runs of one round, with their quartiles."""
    ratios = [pace / plain for pace, plain in zip(paces, base, strict=True)]
    if len(ratios) < 3:
        return f"x{statistics.median(ratios):.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"x{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
