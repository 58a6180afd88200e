"""The families of models by how they write calls and reasoning, and the choice of one for a checkpoint."""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeserve.frontend.parsers.calls import CallShape, JsonCalls, JsonLayout, MarkedCalls, MistralCalls
from moeserve.frontend.parsers.harmony import HARMONY_MARKERS
from moeserve.frontend.parsers.reasoning import Reasoning
from moeserve.frontend.parsers.tagged import Layout, TaggedCalls

DEEPSEEK = MarkedCalls(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    separator="<｜tool▁sep｜>",
    has_ids=False,
)
KIMI = MarkedCalls(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    separator="<|tool_call_argument_begin|>",
    has_ids=True,
)
CALLS: Mapping[str, CallShape] = {
    "hermes": JsonCalls(JsonLayout("<tool_call>\n", after="\n</tool_call>", between="\n</tool_call>\n<tool_call>\n")),
    "qwen3-coder": TaggedCalls(
        Layout(
            region=("<tool_call>\n", "</tool_call>"),
            call=("<function=", ">\n", "</function>\n"),
            argument=("<parameter=", ">\n", "\n</parameter>\n"),
            between="</tool_call>\n<tool_call>\n",
        )
    ),
    "mistral": MistralCalls(),
    "deepseek": DEEPSEEK,
    "glm": TaggedCalls(
        Layout(
            region=("", ""),
            call=("<tool_call>", "\n", "</tool_call>"),
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            between="\n",
            is_loose=True,
        )
    ),
    "kimi": KIMI,
    "minimax": TaggedCalls(
        Layout(
            region=("<minimax:tool_call>\n", "</minimax:tool_call>"),
            call=('<invoke name="', '">\n', "</invoke>\n"),
            argument=('<parameter name="', '">', "</parameter>\n"),
        )
    ),
    # Harmony reads calls itself; these are the markers of its calls, for callers that ask for markers.
    "harmony": JsonCalls(JsonLayout(""), *HARMONY_MARKERS),
    "llama3": JsonCalls(
        JsonLayout("", between="; ", object='{"name": "NAME", "parameters": '), "<|python_tag|>", is_bare=True
    ),
    "granite": JsonCalls(JsonLayout("<|tool_call|>[", after="]"), "<tool_call>", close="</tool_call>"),
}
REASONING: Mapping[str, Reasoning] = {
    "think": Reasoning("<think>", "</think>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "harmony": Reasoning("<|channel|>", "<|end|>"),
}

# Texts in a chat template that name a family of models, the most special first.
_CALLS_IN_TEMPLATE = (
    ("<|channel|>", "harmony"),
    ("<minimax:tool_call>", "minimax"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3-coder"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("<|python_tag|>", "llama3"),
)
_CALLS_OF_TYPE = {
    "gpt_oss": "harmony",
    "minimax_m2": "minimax",
    "glm4_moe": "glm",
    "glm4_moe_lite": "glm",
    "deepseek_v3": "deepseek",
    "kimi_k2": "kimi",
    "granitemoe": "granite",
}
_REASONING_IN_TEMPLATE = (
    ("<|channel|>", "harmony"),
    ("[THINK]", "mistral"),
    ("<think>", "think"),
    ("</think>", "think"),
)


def choose_families(templates: Sequence[str], model_type: str, calls: str, reasoning: str) -> tuple[str, str]:
    """Return the names of a checkpoint's families for calls and for reasoning; see `choose_shape`."""
    source = "\n".join(templates)
    if calls == "auto":
        by_template = (name for marker, name in _CALLS_IN_TEMPLATE if marker in source)
        calls = next(by_template, _CALLS_OF_TYPE.get(model_type, "hermes"))
    if reasoning == "auto":
        default = "harmony" if model_type == "gpt_oss" else "none"
        reasoning = next((name for marker, name in _REASONING_IN_TEMPLATE if marker in source), default)
    return calls, reasoning
