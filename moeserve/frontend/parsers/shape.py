"""The spelling of one model's answers: its families, and the parser and the grammar of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, Tool
from moeserve.frontend.errors import invalid
from moeserve.frontend.parsers.call_grammars import GRAMMARS, call_grammar
from moeserve.frontend.parsers.families import calls_of, choose_families, reasoning_of
from moeserve.frontend.parsers.message_form import HARMONY, MESSAGES, Messages, Start, ends_in_thought
from moeserve.frontend.parsers.parser import OutputParser
from moeserve.frontend.parsers.reasoning import Reasoning
from moeserve.frontend.text import TextTokenizer
from moeserve.model.files import read_json

# Hy's tags carry a suffix that its tokenizer knows.
_SUFFIXED = re.compile(r"<tool_calls(:\w+)>")


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The spelling of a model's answers: the names of its family for calls and for reasoning.

    `none` in place of a name: nothing is looked for.

    is_fenced: the JSON of its calls stands in fences, DeepSeek's older form. suffix: in every tag of the vocabulary.
    """

    calls: str = "none"
    reasoning: str = "none"
    is_fenced: bool = False
    suffix: str = ""

    @property
    def messages(self) -> Messages | None:
        """The form of answers that are messages."""
        return MESSAGES.get(self.calls) or MESSAGES.get(self.reasoning)

    @property
    def thoughts(self) -> Reasoning | None:
        """The markers of reasoning."""
        return reasoning_of(self.reasoning, self.suffix)

    @property
    def markers(self) -> frozenset[str]:
        """Every text that parsing needs to see."""
        calls, reasoning, messages = calls_of(self.calls, self.suffix), self.thoughts, self.messages
        found = (*calls.opens, *calls.others) if calls is not None else ()
        around = (reasoning.begin, reasoning.end, *reasoning.frame) if reasoning is not None else ()
        return frozenset((*found, *around, *(messages.markers if messages is not None else ())))

    def applies(self, request: GenerateRequest) -> bool:
        """Return whether answers of the request are parsed."""
        if not isinstance(request.prompts[0], ChatPrompt):
            return False
        return self.messages is not None or self.reasoning != "none" or self.looks_for_calls(request)

    def thinks(self, request: GenerateRequest) -> bool:
        """Return whether answers of the request may hold thoughts, which are counted and may have a budget."""
        return self.reasoning != "none" and (isinstance(request.prompts[0], ChatPrompt) or bool(request.thought.starts))

    def start_of_text(self, text: str) -> Literal["reasoning", "answer"]:
        """Return where a prompt that is no chat leaves off. text: all of it, special tokens too."""
        reasoning = self.thoughts
        if reasoning is None:
            return "answer"
        if self.messages is HARMONY:
            return "reasoning" if ends_in_thought(text) else "answer"
        return "reasoning" if text.rfind(reasoning.begin) > text.rfind(reasoning.end) else "answer"

    def parser(
        self, request: GenerateRequest, start: Start, tokenizer: TextTokenizer, new_id: Callable[[], str]
    ) -> OutputParser:
        """Return a parser for one choice. new_id: makes ids of calls."""
        return OutputParser(
            reasoning=self.thoughts,
            calls=calls_of(self.calls, self.suffix) if self.looks_for_calls(request) else None,
            messages=self.messages,
            start=start,
            schemas={tool.name: tool.parameters for tool in request.tools},
            hidden=tokenizer.special_in(self.markers)[1],
            tokens=tokenizer.added_ids.keys(),
            parallel=request.parallel_tool_calls,
            new_id=new_id,
        )

    def start_of(self, request: GenerateRequest, prompt_tail: str, number: int = 0) -> Start:
        """Return where prompt `number` leaves off. prompt_tail: the text of its last tokens, special ones too."""
        prompt = request.prompts[0]
        if not isinstance(prompt, ChatPrompt):
            return request.thought.starts[number]
        reasoning, continued = self.thoughts, prompt.continued
        if reasoning is None or self.messages is HARMONY:
            return "text" if continued is not None else "answer"
        if continued is not None:
            is_open = continued.rfind(reasoning.begin) > continued.rfind(reasoning.end)
            return "reasoning" if is_open else "text"
        return "reasoning" if prompt_tail.rstrip().endswith(reasoning.begin) else "answer"

    def grammar(self, request: GenerateRequest, prompt_tail: str, ids: Mapping[str, int]) -> str | None:
        """Return the grammar that an answer's calls, or its reasoning before a format, need; None for no such need.

        Calls are held to the tools' schemas where the request forces calls, allows some tools only, has strict tools or
        asks for a format of text; the grammar then refers to the format's by the name `grammars.ANSWER`. ids: of the
        tokenizer's added tokens, by text. Raise ApiError for forced calls that nothing would read.
        """
        if not isinstance(request.prompts[0], ChatPrompt):
            return None
        choice, has_format = request.tool_choice, request.output_format is not None
        forced = choice.mode == "required"
        if forced and self.calls == "none":
            raise invalid("`tool_choice` asks for a call, but this server reads none from its model", "tool_choice")
        tools = self.callable_tools(request)
        holds_calls = bool(tools) and (forced or has_format or bool(choice.names) or any(t.strict for t in tools))
        if not holds_calls and not (has_format and (self.messages is not None or self.reasoning != "none")):
            return None
        self._check_grammar(request, holds_calls)
        family = "harmony" if self.messages is HARMONY else self.calls
        return call_grammar(
            "deepseek-fenced" if self.is_fenced else family,
            tools,
            suffix=self.suffix,
            forced=forced,
            # A tool that is forced by its name is called once, as clients expect that name it.
            parallel=request.parallel_tool_calls and not (forced and len(choice.names) == 1),
            ids=ids,
            start=self.start_of(request, prompt_tail),
            reasoning=self.thoughts,
            has_format=has_format,
        )

    def callable_tools(self, request: GenerateRequest) -> list[Tool]:
        """Return the tools that the model may call."""
        tools = request.tools if self.looks_for_calls(request) else ()
        return [tool for tool in tools if not request.tool_choice.names or tool.name in request.tool_choice.names]

    def _check_grammar(self, request: GenerateRequest, holds_calls: bool) -> None:
        """Raise ApiError for a form of the answer that nothing can hold this model to."""
        if (self.messages is None and not holds_calls) or self.messages is HARMONY or self.calls in GRAMMARS:
            return
        choice, asked = request.tool_choice, request.output_format
        is_chosen = choice.mode == "required" or bool(choice.names)
        where = "tool_choice" if is_chosen else "tools" if asked is None else asked.where
        family = self.calls if holds_calls else self.reasoning
        raise invalid(f"`{where}` asks for a form to which a model that writes `{family}` cannot be held", where)

    def looks_for_calls(self, request: GenerateRequest) -> bool:
        """Return whether answers of the request may hold calls."""
        return self.calls != "none" and bool(request.tools) and request.tool_choice.mode != "none"


PLAIN = OutputShape()


def model_type_of(folder: Path) -> str:
    """Return `model_type` of `config.json`, nothing where there is none."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    return str(config.get("model_type", ""))


def choose_shape(
    templates: Sequence[str],
    model_type: str,
    calls: str = "auto",
    reasoning: str = "auto",
    added: Iterable[str] = (),
) -> OutputShape:
    """Return the shape of a checkpoint's answers. templates: the sources of its chat templates. added: the texts of its
    added tokens.

    calls, reasoning: names of `CALLS` and `REASONING`, `none` or `auto`. Without a known family, calls are in hermes'
    form, which the prompt then explains to the model.
    """
    calls, reasoning = choose_families(templates, model_type, calls, reasoning)
    is_fenced = calls == "deepseek" and any("```json" in source for source in templates)
    found = (_SUFFIXED.fullmatch(text) for text in added) if calls == "hy" else ()
    suffix = next((match[1] for match in found if match), "")
    return OutputShape(calls, reasoning, is_fenced, suffix)
