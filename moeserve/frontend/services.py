"""The services that the routes of one frontend share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from moeserve.frontend import limits
from moeserve.frontend.admission import Admission
from moeserve.frontend.answer import PromptText, decode_prompt
from moeserve.frontend.bodies import Bodies
from moeserve.frontend.dialects.internal import ChatPrompt, ModelFacts
from moeserve.frontend.engine_client import EngineClient
from moeserve.frontend.grammar_checker import GrammarChecker
from moeserve.frontend.http import ApiError, context_length_exceeded, invalid, unavailable
from moeserve.frontend.live import LiveStats
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.parsers.families import PLAIN, OutputShape, choose_shape
from moeserve.frontend.request_group import CrashSuspect, EngineBusy, EngineGone, EngineSilent
from moeserve.frontend.template_renderer import TemplateRenderer, check_model_texts, render_job
from moeserve.frontend.templates import GuardedPrompt, guard_prompt, read_sources
from moeserve.frontend.text import TextTokenizer
from moeserve.frontend.workers import InlineBudget, Workers
from moeserve.model.files import read_json
from moeserve.pacing import service_slo
from moeserve.wire import RunContext, Stats

_THREADS = 2
# While one is rendered another is prepared.
_LONG_CONVERSATIONS = 2
_RETRY_WHILE_LOADING_S = 5.0
_RETRY_ELSEWHERE_S = 10.0
# A text with so many bytes per token that fits is looked at before it is tokenised as a whole.
_MANY_BYTES = 4
# About as long as rendering a tool's schema takes.
_CHARS_PER_TOOL = 2000


class Services:
    """The shared services of one frontend's routes."""

    def __init__(
        self,
        run: RunContext,
        tokenizer: TextTokenizer,
        template: TemplateRenderer | None,
        shape: OutputShape = PLAIN,
        num_dropped_lines: Callable[[], int] = lambda: 0,
        news_fd: int | None = None,
        number: int = 0,
    ) -> None:
        """shape: how the model writes reasoning and calls. num_dropped_lines: of this process's logs, for a metric.
        news_fd: see `EngineClient`. number: of this frontend among those of the service, from 0."""
        self.run = run
        self.number = number
        self.tokenizer = tokenizer
        self.template = template
        self.shape = shape
        self.metrics = Metrics(num_dropped_lines, lambda: self.engine.num_restarts, run.shared_metrics)
        self.live = LiveStats(self.metrics)
        self.grammars = GrammarChecker(Path(run.model_dir) / "tokenizer.json")
        self.engine = EngineClient(run, self._on_stats, news_fd)
        # Apart, so that counting tokens holds up no generation.
        self.workers = Workers("generation", _THREADS, limits.MAX_WAITING_CHARS)
        self.token_workers = Workers("tokens", 1, limits.MAX_WAITING_CHARS)
        self.bodies = Bodies(run.config.max_request_bytes)
        # On its way through the template a conversation takes several times its size; a text that becomes tokens takes
        # a hundred times its size, or four hundred.
        self._long_texts = asyncio.Semaphore(1)
        self._long_conversations = asyncio.Semaphore(_LONG_CONVERSATIONS)
        self.slo = service_slo(run.config)
        self.admission = Admission(self.metrics.rejections, random.random, num_frontends=run.config.num_frontends)
        self._draining = False
        self.created = int(time.time())
        self.fingerprint = f"fp_{run.model_hash[:12]}"
        # Each frontend draws others.
        self._seeds = random.Random(run.config.seed + (number << 64))
        self._facts: ModelFacts | None = None

    @classmethod
    def load(
        cls,
        run: RunContext,
        num_dropped_lines: Callable[[], int] = lambda: 0,
        news_fd: int | None = None,
        number: int = 0,
    ) -> Services:
        """Read the checkpoint's tokenizer and template. Raises ModelError if they cannot be used."""
        folder = Path(run.model_dir)
        check_model_texts(folder)
        tokenizer = TextTokenizer.from_file(folder / "tokenizer.json")
        sources = read_sources(folder)
        shape = choose_shape(sources, _model_type(folder), run.config.tool_call_parser, run.config.reasoning_parser)
        template = TemplateRenderer(folder) if sources else None
        return cls(run, tokenizer, template, shape, num_dropped_lines, news_fd, number)

    async def start(self) -> None:
        """Connect to the engine without waiting, and start the template's process, so that no conversation does."""
        await self.engine.start()
        if self.template is not None:
            await self.template.start()

    async def stop(self) -> None:
        """Leave the engine and end the processes and threads beside this one."""
        await self.engine.stop()
        await self.grammars.stop()
        if self.template is not None:
            await self.template.stop()
        self.workers.stop()
        self.token_workers.stop()
        self.bodies.stop()

    def begin_drain(self) -> None:
        """Refuse new generations from now on."""
        self._draining = True

    def not_ready_reason(self) -> str | None:
        """Return why no generation would be admitted now, or None."""
        if self._draining:
            return "draining"
        engine = self.engine
        if engine.dead_reason is not None or engine.away_reason is not None:
            return engine.dead_reason or engine.away_reason
        return self.admission.overload() if engine.ready is not None else "the model is loading"

    def check_serving(self) -> ModelFacts:
        """Return the model's facts. Raises ApiError (503) unless generations are admitted."""
        if self._draining:
            raise unavailable("The server is shutting down", "draining", _RETRY_ELSEWHERE_S, close=True)
        if self.engine.dead_reason is not None:
            raise unavailable("The engine is not running", "engine_dead", _RETRY_ELSEWHERE_S)
        # A short pause is waited for.
        if self.engine.away_reason is not None and self.engine.restart_seconds > self.run.config.engine_timeout:
            raise unavailable("The engine is being restarted", "engine_restarting", self.engine.restart_seconds)
        ready = self.engine.ready
        if ready is None:
            raise unavailable("The model is still loading", "loading", _RETRY_WHILE_LOADING_S)
        if self._facts is None or self._facts.max_model_len != ready.max_model_len:
            self._facts = ModelFacts(
                names=self.run.served_model_names,
                max_model_len=ready.max_model_len,
                vocab_size=ready.vocab_size,
                eos_token_ids=tuple(ready.eos_token_ids),
                default_sampling=ready.default_sampling,
                max_logprobs=self.run.config.max_logprobs,
                keeps_states=ready.keeps_states,
            )
        return self._facts

    @property
    def capacity(self) -> int:
        """The number of choices that the engine runs and queues."""
        ready = self.engine.ready
        return ready.max_num_seqs + ready.max_num_queued_reqs if ready is not None else 0

    def draw_seed(self) -> int:
        """Return a seed for a request without one."""
        return self._seeds.getrandbits(63)

    def _on_stats(self, stats: Stats) -> None:
        self.metrics.on_stats(stats)
        self.live.on_stats(stats)
        if stats.load is not None:
            self.admission.on_load(stats.load)

    async def encode(
        self,
        prompt: ChatPrompt | str | list[int],
        facts: ModelFacts,
        budget: InlineBudget | None = None,
        workers: Workers | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt. Raises ApiError.

        budget: of the request, where it has several prompts; what exceeds it is done by `workers`, those of generation
        unless given.
        """
        if isinstance(prompt, list):
            return prompt
        budget, workers = budget or InlineBudget(limits.INLINE_CHARS), workers or self.workers
        if isinstance(prompt, ChatPrompt):
            field, (text, mark) = prompt.request_field, await self._render(prompt, budget, workers)
        else:
            field, text, mark = "prompt", prompt, None
        # A text needs at least this many tokens of the longest kind, so prompts that cannot fit need no tokenising.
        least = len(text) // self.tokenizer.longest_token
        if least >= facts.max_model_len:
            raise context_length_exceeded(facts.max_model_len, least, 1, at_least=True, param=field)
        encode = partial(self._encode, text, mark, facts.max_model_len, field)
        if budget.take(len(text)):
            token_ids = encode()
        elif len(text) < limits.LONG_TEXT_CHARS:
            token_ids = await workers.run(len(text), encode)
        else:
            async with self._long_texts:
                token_ids = await workers.run(len(text), encode)
        if token_ids is None:
            raise context_length_exceeded(facts.max_model_len, facts.max_model_len, 1, at_least=True, param=field)
        if not token_ids:
            raise invalid("The prompt has no tokens", field)
        return token_ids

    async def prompt_texts(self, prompts: Sequence[list[int]], budget: InlineBudget) -> list[PromptText]:
        """Return the text of each prompt. Raises ApiError (503) if too much is waiting."""
        texts = []
        for prompt in prompts:
            chars = limits.CHARS_PER_TOKEN * len(prompt)
            decode = partial(decode_prompt, self.tokenizer, prompt)
            texts.append(decode() if budget.take(chars) else await self.workers.run(chars, decode))
        return texts

    def _encode(self, text: str, mark: str | None, most: int, field: str) -> list[int] | None:
        """Return the token ids of a text, None for one that has far more than `most`. Raises ApiError for one that has
        not, but very many characters."""
        # Tokens that are counted in parts may be a few more, at the cuts, but never twice as many.
        if len(text.encode("utf-8", "replace")) > _MANY_BYTES * most and self.tokenizer.has_more(text, 2 * most):
            return None
        most_chars = limits.MAX_CHARS_PER_TOKEN * most
        if len(text) > most_chars:
            message = f"The prompt has {len(text)} characters; for this model's context at most {most_chars} are read"
            raise invalid(message, field, "context_length_exceeded")
        return self.tokenizer.encode(text) if mark is None else self.tokenizer.encode_rendered(text, mark)

    async def _render(self, prompt: ChatPrompt, budget: InlineBudget, workers: Workers) -> tuple[str, str]:
        template = self.template
        if template is None:
            raise ApiError(
                400,
                "This model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )

        size = sum(len(message["content"]) for message in prompt.messages) + _CHARS_PER_TOOL * len(prompt.tools)
        guard = partial(self._guard, prompt)
        if budget.take(size):
            job, guarded = guard()
            return guarded.cut(await template.render(job)), guarded.mark
        # A conversation that came in a small body waits for no big one.
        run = workers.run if budget.is_small else self.bodies.run
        async with self._long_conversations:
            job, guarded = await run(size, guard)
            return guarded.cut(await template.render(job)), guarded.mark

    def _guard(self, prompt: ChatPrompt) -> tuple[bytes, GuardedPrompt]:
        """Return a prompt for the template's process, and what its text still needs."""
        guarded = guard_prompt(self.tokenizer, prompt)
        return render_job(guarded.messages, guarded.arguments), replace(guarded, messages=[], arguments={})


def engine_unavailable(error: EngineGone) -> ApiError:
    """503: the engine is gone, or it has not answered in time. 500 for a request that may be why it is gone."""
    message = str(error)[:1].upper() + str(error)[1:]
    match error:
        case EngineSilent():
            return unavailable(message, "engine_silent", _RETRY_WHILE_LOADING_S)
        case EngineBusy():
            return ApiError(429, message, type="rate_limit_error", code="key_commands_full", retry_after_s=1.0)
        case CrashSuspect():
            return ApiError(500, message, type="server_error", code="engine_crash", may_retry=False)
        case _:
            return unavailable(message, "engine_dead")


def _model_type(folder: Path) -> str:
    """Return `model_type` of `config.json`, nothing where there is none."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    return str(config.get("model_type", ""))
