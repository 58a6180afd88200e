"""From the bytes of a body to token ids, or to the error that the client gets: `Preparer.prepare`.

One synchronous function does all of it: it reads the body within bounds, renders the chat template, tokenises, compiles
the grammar of the answer, and finds the borders that the prompt cache wants. It runs in text processes, which can be
ended; the event loop calls it itself for small bodies that need neither template nor grammar.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, chat, completions, fields, messages, ollama, responses, tgi
from moeserve.frontend.dialects.batch_lines import read_part
from moeserve.frontend.dialects.formats import Constraint, constraint_of, of_calls
from moeserve.frontend.dialects.internal import (
    CacheOptions,
    ChatPrompt,
    GenerateRequest,
    ModelFacts,
    Tool,
    ToolChoice,
)
from moeserve.frontend.dialects.responses_items import Earlier
from moeserve.frontend.errors import (
    ApiError,
    chat_template_failed,
    check_choices,
    context_length_exceeded,
    invalid,
    longest_output,
)
from moeserve.frontend.http import inflate
from moeserve.frontend.parsers.shape import OutputShape
from moeserve.frontend.prepare.grammar_check import GrammarCheck
from moeserve.frontend.prepare.templates import ChatTemplate, guard_prompt
from moeserve.frontend.prepare.text_messages import (
    Ask,
    Body,
    NeedsEarlier,
    Prefix,
    Prepared,
    Relaxed,
    Reply,
    Stage,
    Watch,
    for_answer,
)
from moeserve.frontend.text import NO_IDS, PieceMemory, PromptText, TextTokenizer, decode_prompt, prompt_tail
from moeserve.plan import CacheWish, SamplingParams

_MANY_BYTES = 4  # a text with more bytes than this per token that fits is counted before it is tokenised
READERS: dict[str, Callable[[bytes, ModelFacts], GenerateRequest]] = {
    "chat": chat.parse,
    "completions": completions.parse,
    "messages": messages.parse,
    "ollama_chat": ollama.parse_chat,
    "ollama_generate": ollama.parse_generate,
    "tgi": tgi.parse_tgi,
    "tgi_stream": tgi.parse_tgi_stream,
    "triton": tgi.parse_triton,
    "triton_stream": tgi.parse_triton_stream,
    "warm": chat.parse_warm,
}

Encode = Callable[[ChatPrompt], Sequence[int]]
Retentions = tuple[tuple[int, float], ...]


class NotHere(Exception):
    """The body needs a template or a grammar, which only text processes have."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Foreign programs that run in text processes: the checkpoint's template, None without one, and grammars."""

    template: ChatTemplate | None
    grammars: GrammarCheck
    memory: PieceMemory


class Preparer:
    """Prepares bodies with one checkpoint's tokenizer. What it remembers of earlier bodies only saves time."""

    def __init__(
        self, tokenizer: TextTokenizer, shape: OutputShape, watch: Watch, programs: Programs | None = None
    ) -> None:
        """shape: how the model writes reasoning and calls. programs: None on the event loop."""
        self._tokenizer = tokenizer
        self._shape = shape
        self._watch = watch
        self._programs = programs

    def prepare(self, ask: Ask, body: bytes) -> Reply:
        """Return the prepared request of a body, or the refusal that its client gets. Raise NotHere."""
        self._watch.enter(Stage.READ, len(body) + ask.num_earlier_bytes)
        try:
            return self._prepare(ask, body)
        except ApiError as error:
            return error
        finally:
            self._watch.leave()

    def _prepare(self, ask: Ask, body: bytes) -> Reply:
        facts = ask.model
        if ask.coding is not None:
            body = inflate(body, ask.coding, ask.max_bytes)
            self._watch.enter(Stage.READ, len(body) + ask.num_earlier_bytes)
        match ask.kind:
            case "responses":
                if ask.earlier is None and (named := responses.earlier_names(body)) is not None:
                    return NeedsEarlier(named)
                return self._generation(responses.parse(body, facts, ask.earlier or Earlier()), ask)
            case "prefix" | "pin":
                return self._prefix(ask, body)
            case "tokenize":
                return self._tokenize(ask, body)
            case "detokenize":
                token_ids = chat.parse_detokenize(body, facts)
                self._watch.enter(Stage.ENCODE, limits.CHARS_PER_TOKEN * len(token_ids))
                return _json({"prompt": self._tokenizer.decode(token_ids, skip_special_tokens=False)})
            case "count_message":
                prompt = messages.parse_count(body, facts)
                return _json({"input_tokens": len(self._encode(prompt, facts, ask.owner))})
            case "conversation":
                return _json(responses.parse_conversation(body))
            case "conversation_items":
                return _json(responses.parse_items(body))
            case "conversation_metadata":
                return _json(responses.parse_metadata(body))
            case "batch_lines":
                assert ask.part is not None
                return _json(read_part(body, ask.part, ask.max_bytes))
            case kind:
                return self._generation(READERS[kind](body, facts), ask)

    def _generation(self, request: GenerateRequest, ask: Ask) -> Prepared:
        if ask.reports or request.cache.report:
            # In a stream the cache report comes with the usage.
            request = replace(request, cache=replace(request.cache, report=True), include_usage=True)
        check_choices(request.num_sequences, ask.max_choices)
        facts, owner = ask.model, _owner(ask, request.cache_salt)
        request = replace(request, bound=facts.bound_of(request.max_tokens))
        encode = partial(self._encode, facts=facts, owner=owner)
        prompts = []
        for prompt in request.prompts:
            end = request.truncate
            prompts.append(encode(prompt) if end is None else self._end_of(prompt, end, facts, owner))
            # A prompt that does not fit is refused before the others are read.
            longest_output(len(prompts[-1]), facts.max_model_len, request.prompt_field)
        request = self._with_starts(request, prompts)
        if idle := self._without_effect(request, facts):
            request = replace(request, ignored=tuple(sorted({*request.ignored, *idle})))
        sampling, relaxed = self._constrained(request, prompts[0], facts.eos_token_ids)
        if request.beams is not None and sampling.grammar is not None:
            message = "A bound form of the answer cannot be used together with `use_beam_search`"
            raise invalid(message, "use_beam_search")
        request = replace(request, sampling=sampling)
        wishes = None
        if asks_cache(request.cache, keeps_states=facts.keeps_states):
            wishes = []
            for prompt, token_ids in zip(request.prompts, prompts, strict=True):
                kept, borders = marked_lengths(
                    prompt, token_ids, request.cache, encode, keeps_states=facts.keeps_states
                )
                wishes.append(CacheWish(kept, request.cache.report, borders, ask.tells_salts))
        texts = []
        if request.shows_prompts:
            texts = [self._shown(request, *pair) for pair in zip(request.prompts, prompts, strict=True)]
        if request.prediction and (request.beams is not None or not facts.drafts):
            request = replace(request, prediction="", ignored=tuple(sorted({*request.ignored, "prediction"})))
        prediction = self._predicted(request, facts)
        return Prepared(for_answer(request), prompts, wishes, texts, prediction, relaxed)

    def _without_effect(self, request: GenerateRequest, facts: ModelFacts) -> list[str]:
        """Return the fields without effect: budgets for thoughts if the model has none, switches that its template does
        not read, and progress where nobody hears it."""
        thinks, prompt = self._shape.thinks(request), request.prompts[0]
        found = [] if thinks else list(request.thought.fields)
        if request.reports_progress and not request.hears_progress:
            found.append("return_progress")
        template = None if self._programs is None else self._programs.template
        if isinstance(prompt, ChatPrompt) and template is not None:
            has_budget = thinks and request.thought.effort in facts.mapped_efforts
            for path, variables in prompt.switches.items():
                if not any(map(template.may_read, variables)) and not (has_budget and fields.EFFORT in variables):
                    found.append(path)
        return found

    def _with_starts(self, request: GenerateRequest, prompts: list[array[int]]) -> GenerateRequest:
        """Return a request for texts with the places where these leave off. A form of the answer has no thoughts."""
        is_chat = isinstance(request.prompts[0], ChatPrompt)
        if is_chat or self._shape.reasoning == "none" or request.output_format is not None:
            return request
        starts = []
        for prompt, token_ids in zip(request.prompts, prompts, strict=True):
            self._watch.enter(Stage.ENCODE, limits.CHARS_PER_TOKEN * len(token_ids))
            text = prompt if isinstance(prompt, str) else self._tokenizer.decode(token_ids, skip_special_tokens=False)
            starts.append(self._shape.start_of_text(text))
        return replace(request, thought=replace(request.thought, starts=tuple(starts)))

    def _predicted(self, request: GenerateRequest, facts: ModelFacts) -> array[int]:
        """Return the tokens of the text that the client predicts, up to the longest possible answer."""
        text = request.prediction
        if not text:
            return array("i")
        self._watch.enter(Stage.ENCODE, len(text))
        most = request.longest_output(facts.max_model_len)
        shown = text[: most * self._tokenizer.longest_token]
        return array("i", self._tokenizer.encode(shown, add_special_tokens=False))[:most]

    def _constrained(
        self, request: GenerateRequest, prompt: array[int], eos_token_ids: Sequence[int]
    ) -> tuple[SamplingParams, tuple[Relaxed, ...]]:
        """Return the sampling parameters with the grammar that the request needs, if any, and the tools whose schemas
        have lost words for it. Raise ApiError, NotHere."""
        tail, ids = prompt_tail(self._tokenizer, prompt), self._tokenizer.added_ids
        form, tools = request.output_format, self._shape.callable_tools(request)

        def calls_of(tool: Tool) -> str:
            alone = replace(request, tools=(tool,), tool_choice=ToolChoice("required"), output_format=None)
            return self._shape.grammar(alone, tail, ids) or ""

        def constrained(request: GenerateRequest) -> SamplingParams:
            calls = self._shape.grammar(request, tail, ids)
            if calls is not None:
                return check(of_calls(calls, form, ids))
            return request.sampling if form is None else check(constraint_of(form, ids))

        def check(constraint: Constraint) -> SamplingParams:
            if self._programs is None:
                raise NotHere
            return self._programs.grammars.constrain(constraint, request.sampling, eos_token_ids)

        try:
            return constrained(request), ()
        except ApiError:
            if form is not None:
                check(constraint_of(form, ids))
            if not tools or self._programs is None:
                raise
            relaxed, news = self._programs.grammars.relax(tools, calls_of, eos_token_ids)
            if relaxed == tools:
                raise
            return constrained(replace(request, tools=tuple(relaxed))), tuple(news)

    def _shown(
        self, request: GenerateRequest, prompt: ChatPrompt | str | list[int], token_ids: array[int]
    ) -> PromptText:
        """Return the text of a prompt for an answer that shows it: a text as it came, unless only its end is kept."""
        self._watch.enter(Stage.ENCODE, limits.CHARS_PER_TOKEN * len(token_ids))
        is_text = isinstance(prompt, str)
        shown = self._tokenizer.special_token_ids if is_text or not request.skip_special_tokens else NO_IDS
        spoken = prompt if isinstance(prompt, str) and request.truncate is None else None
        return decode_prompt(self._tokenizer, token_ids, shown, spoken)

    def _prefix(self, ask: Ask, body: bytes) -> Prefix:
        kind = chat.PrefixBody if ask.kind == "prefix" else chat.PinBody
        read, ignored = bodies.decode_json(body, kind)
        salt = fields.read_cache_salt(read.cache_salt)
        if isinstance(read, chat.PinBody) and read.id is not None:
            if read.prompt is not None or read.messages is not None:
                raise invalid("Give either `id` or a prefix", "id")
            return Prefix(None, read.id, salt, ignored)
        chat.check_prefix(read, chat.PIN_FIELDS)
        prompt = chat.read_prefix(read, ask.model)
        return Prefix(self._encode(prompt, ask.model, _owner(ask, salt)), None, salt, ignored)

    def _tokenize(self, ask: Ask, body: bytes) -> Body:
        facts = ask.model
        asked = chat.parse_tokenize(body, facts)
        if isinstance(asked, ChatPrompt):
            token_ids = self._encode(asked, facts, ask.owner)
        else:
            token_ids = self._tokenize_text(asked.prompt or "", special=asked.add_special_tokens is not False)
        return _json({"count": len(token_ids), "max_model_len": facts.max_model_len, "tokens": token_ids.tolist()})

    def _tokenize_text(self, text: str, *, special: bool) -> array[int]:
        tokenizer, most = self._tokenizer, limits.MAX_CONVERTED_TOKENS
        self._watch.enter(Stage.ENCODE, len(text))
        # Tokens that are counted in parts may be a few more, at the cuts, but never twice as many.
        if len(text) <= most or not tokenizer.has_more(text, 2 * most):
            token_ids = array("i", tokenizer.encode(text, add_special_tokens=special))
            if len(token_ids) <= most:
                return token_ids
        raise invalid(f"`prompt` has more than {most} tokens", "prompt")

    def _encode(self, prompt: ChatPrompt | str | list[int], facts: ModelFacts, owner: bytes) -> array[int]:
        """Return the token ids of a prompt. Raise ApiError."""
        if isinstance(prompt, list):
            return array("i", prompt)
        if isinstance(prompt, ChatPrompt):
            field, (text, mark) = prompt.request_field, self._render(prompt)
        else:
            field, text, mark = "prompt", prompt, None
        self._watch.enter(Stage.ENCODE, len(text))
        self._check_size(text, facts.max_model_len, field)
        if mark is None or self._programs is None:
            token_ids = array("i", self._tokenizer.encode(text))
        else:
            token_ids = self._programs.memory.encode(text, mark, owner)
        if not token_ids:
            raise invalid("The prompt has no tokens", field)
        return token_ids

    def _end_of(
        self, prompt: ChatPrompt | str | list[int], num_tokens: int, facts: ModelFacts, owner: bytes
    ) -> array[int]:
        """Return the last tokens of a prompt, which may be longer than the context. Raise ApiError."""
        times = limits.MAX_TRUNCATED_CONTEXTS
        try:
            token_ids = self._encode(prompt, replace(facts, max_model_len=times * facts.max_model_len), owner)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            message = f"The prompt is longer than {times} times this model's context: it is not read to be truncated"
            raise invalid(message, error.param, error.code) from None
        return token_ids[-num_tokens:]

    def _check_size(self, text: str, most: int, field: str) -> None:
        """Raise ApiError for a text that cannot fit, before it is tokenised: that takes hundreds of times its size."""
        # A text needs at least this many tokens of the longest kind.
        least = len(text) // self._tokenizer.longest_token
        if least >= most:
            raise context_length_exceeded(most, least, 1, at_least=True, param=field)
        # Tokens that are counted in parts may be a few more, at the cuts, but never twice as many.
        if len(text.encode("utf-8", "replace")) > _MANY_BYTES * most and self._tokenizer.has_more(text, 2 * most):
            raise context_length_exceeded(most, most, 1, at_least=True, param=field)
        most_chars = limits.MAX_CHARS_PER_TOKEN * most
        if len(text) > most_chars:
            message = f"The prompt has {len(text)} characters; for this model's context at most {most_chars} are read"
            raise invalid(message, field, "context_length_exceeded")

    def _render(self, prompt: ChatPrompt) -> tuple[str, str]:
        """Return the text of a conversation, and the mark that cuts special tokens in it. Raise ApiError."""
        if self._programs is None:
            raise NotHere
        template = self._programs.template
        if template is None:
            message = "This model has no chat template; use /v1/completions"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        guarded = guard_prompt(self._tokenizer, prompt)
        self._watch.enter(Stage.RENDER)
        text = template.render(guarded.messages, **guarded.arguments)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise chat_template_failed("The chat template gives text that is not Unicode") from None
        return guarded.cut(text), guarded.mark


def make_programs(
    folder: Path,
    tokenizer: TextTokenizer,
    template: ChatTemplate | None,
    watch: Watch,
    grammar_tokens: LLTokenizer | None = None,
) -> Programs:
    """Return the programs of a checkpoint for one text process. grammar_tokens: if they are loaded already."""
    borders = [text for text in tokenizer.borders if template is not None and template.may_write(text)]
    memory = PieceMemory(tokenizer, borders, limits.MAX_PIECE_BYTES)
    return Programs(template, GrammarCheck(folder / "tokenizer.json", watch, grammar_tokens), memory)


def _owner(ask: Ask, cache_salt: str) -> bytes:
    """Return the owner of the pieces that a request may find: its own key, narrowed by its salt."""
    return ask.owner + b"/" + cache_salt.encode("utf-8", "surrogatepass")


def _json(content: object) -> Body:
    return Body(msgspec.json.encode(content))


def asks_cache(options: CacheOptions, *, keeps_states: bool) -> bool:
    """Return whether a request needs a `CacheWish` for each prompt."""
    return options.seconds is not None or bool(options.breakpoints) or options.report or keeps_states


def marked_lengths(
    prompt: ChatPrompt | str | list[int],
    token_ids: Sequence[int],
    options: CacheOptions,
    encode: Encode,
    *,
    keeps_states: bool,
) -> tuple[Retentions, tuple[int, ...]]:
    """Return the prefixes of a prompt to retain and the borders in it, see `CacheWish`.

    encode: gives the token ids of other conversations; may raise ApiError.
    """
    retentions = [] if options.seconds is None else [(len(token_ids), options.seconds)]
    borders: tuple[int, ...] = ()
    if isinstance(prompt, ChatPrompt):
        for num_messages, seconds in options.breakpoints[-limits.MAX_CACHE_BREAKPOINTS :]:
            retentions.append((_prefix_length(prompt, num_messages, token_ids, encode), seconds))
        if keeps_states:
            borders = _borders(prompt, token_ids, encode)
    kept = tuple((num_tokens, seconds) for num_tokens, seconds in retentions if num_tokens)
    return kept, borders


def _borders(prompt: ChatPrompt, token_ids: Sequence[int], encode: Encode) -> tuple[int, ...]:
    """Return the tokens before which tools and system messages end, and before which the answer's head begins.

    Other conversations begin with the same system messages. The next turn of this one may have another head before the
    answer: many templates leave out reasoning that was opened there.
    """
    borders = []
    num_first = next(
        (index for index, one in enumerate(prompt.messages) if one["role"] not in ("system", "developer")), 0
    )
    if num_first or prompt.tools:
        borders.append(_prefix_length(prompt, num_first, token_ids, encode))
    if prompt.add_generation_prompt:
        short = replace(prompt, messages=[{"role": "user", "content": "."}], tools=(), continue_final=False)
        with suppress(ApiError):
            head = encode(short)[len(encode(replace(short, add_generation_prompt=False))) :]
            if head and token_ids[-len(head) :] == head:
                borders.append(len(token_ids) - len(head))
    return tuple(border for border in borders if border)


def _prefix_length(prompt: ChatPrompt, num_messages: int, token_ids: Sequence[int], encode: Encode) -> int:
    """Count the tokens of the prompt that its tools and first messages determine.

    The prompt begins with these tokens, and so do the messages rendered alone: a template may write the end of a
    conversation in another way than its middle. Templates that refuse them alone leave no prefix to retain.
    """
    if num_messages >= len(prompt.messages):
        return len(token_ids)
    head = replace(prompt, messages=prompt.messages[:num_messages], add_generation_prompt=False)
    try:
        alone = encode(head)
    except ApiError:
        return 0
    limit = min(len(alone), len(token_ids))
    return next((index for index in range(limit) if alone[index] != token_ids[index]), limit)
