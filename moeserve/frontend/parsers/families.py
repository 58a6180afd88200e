"""The families of models by how they write calls and reasoning, and the choice of one for a checkpoint."""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from moeserve.frontend.parsers.calls import CallShape, JsonCalls, JsonLayout, MarkedCalls, MistralCalls
from moeserve.frontend.parsers.elements import ElementCalls
from moeserve.frontend.parsers.literals import GemmaCalls, PythonCalls
from moeserve.frontend.parsers.message_form import MESSAGES
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
_PARAMETERS = '{"name": "NAME", "parameters": '


def _functions(tag: str, line: str = "\n", value: tuple[str, str] = (">\n", "\n</parameter>\n")) -> TaggedCalls:
    """Return Qwen3-Coder's form. tag: around a call. line: behind each tag but those of values. value: around one."""
    begin, end = f"<{tag}>{line}", f"</{tag}>"
    call = ("<function=", f">{line}", f"</function>{line}")
    return TaggedCalls(Layout((begin, end), call, ("<parameter=", *value), between=f"{end}{line}{begin}"))


def _invokes(begin: str, end: str, *, prefix: str = "", line: str = "\n", kind: str = "") -> Layout:
    """Return MiniMax's form. begin, end: of a region. prefix: of the other tags. line: behind them. kind: an attribute
    of values."""
    return Layout(
        (f"{begin}{line}", end),
        (f'<{prefix}invoke name="', f'">{line}', f"</{prefix}invoke>{line}"),
        (f'<{prefix}parameter name="', f'"{kind}>', f"</{prefix}parameter>{line}"),
    )


def _keyed(prefix: str) -> Layout:
    """Return GLM's form. prefix: of each tag."""
    return Layout(
        ("", ""),
        (f"<{prefix}tool_call>", "\n", f"</{prefix}tool_call>"),
        (f"<{prefix}arg_key>", f"</{prefix}arg_key>\n<{prefix}arg_value>", f"</{prefix}arg_value>\n"),
        between="\n",
        is_loose=True,
    )


def _dsml(name: str, *others: str, space: str = "") -> TaggedCalls:
    """Return DeepSeek's form since V3.2. name: of the region. others: spellings of it. space: in each tag."""
    prefix = f"｜DSML｜{space}"
    layout, *regions = (
        _invokes(f"<{prefix}{tag}>", f"</{prefix}{tag}>", prefix=prefix, kind=' string="STRING"')
        for tag in (name, *others)
    )
    return TaggedCalls(layout, *(one.region for one in regions), ends_reasoning=True)


_HY = Layout(
    ("<tool_calls>\n", "</tool_calls>"),
    ("<tool_call>", "<tool_sep>\n", "</tool_call>\n"),
    ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    is_loose=True,
)
_IFM = Layout(
    ("<ifm|tool_calls>", "</ifm|tool_calls>"),
    ("<ifm|tool_call>", "", "</ifm|tool_call>"),
    ("<ifm|arg_key>", "</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>"),
    kind=("<ifm|arg_type>", "</ifm|arg_type>"),
)
_SOLAR = Layout(
    ("", ""),
    ("<|tool_call:start|>", "\n", "<|tool_call:end|>"),
    ("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n"),
)
_KIMI_K3 = Layout(
    ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ('<|open|>call tool="', '"<|sep|>', "<|close|>call<|sep|>"),
    ('<|open|>argument key="', '"<|sep|>', "<|close|>argument<|sep|>"),
)
_COHERE = JsonLayout(
    "<|START_ACTION|>[\n    ",
    after="\n]<|END_ACTION|>",
    between=",\n    ",
    object='{"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
)

CALLS: Mapping[str, CallShape] = {
    "hermes": JsonCalls(JsonLayout("<tool_call>\n", after="\n</tool_call>", between="\n</tool_call>\n<tool_call>\n")),
    "qwen3-coder": _functions("tool_call"),
    "mimo": _functions("tool_call", line="", value=(">", "</parameter>")),
    "seed": _functions("seed:tool_call", value=(">", "</parameter>\n")),
    "zaya": _functions("zyphra_tool_call"),
    "mistral": MistralCalls(),
    "deepseek": DEEPSEEK,
    "deepseek-v3.2": _dsml("function_calls", "tool_calls", "toolcalls"),
    "deepseek-v4": _dsml("tool_calls", "function_calls", "toolcalls"),
    "deepseek-v4.1": _dsml("calls", space=" "),
    "glm": TaggedCalls(_keyed("")),
    "hy": TaggedCalls(_HY),
    "longcat": TaggedCalls(_keyed("longcat_")),
    "kimi": KIMI,
    "kimi-k3": TaggedCalls(_KIMI_K3, ends_reasoning=True),
    "minimax": TaggedCalls(_invokes("<minimax:tool_call>", "</minimax:tool_call>")),
    "dots": TaggedCalls(_invokes("<dots_function_call>", "</dots_function_call>", line="")),
    "step3": TaggedCalls(
        _invokes("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", prefix="steptml:", line=""),
        skipped=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
    ),
    "k2-horizon": TaggedCalls(_IFM),
    "solar": TaggedCalls(_SOLAR),
    # Messages read calls themselves; these are their markers, for callers that ask for markers.
    **{name: JsonCalls(JsonLayout(""), *form.markers) for name, form in MESSAGES.items()},
    "llama3": JsonCalls(JsonLayout("", between="; ", object=_PARAMETERS), "<|python_tag|>", is_bare=True),
    "granite": JsonCalls(JsonLayout("<|tool_call|>[", after="]"), "<tool_call>", close="</tool_call>"),
    "hunyuan": JsonCalls(JsonLayout("<tool_calls>[", after="]</tool_calls>")),
    "cohere": JsonCalls(_COHERE, ends_reasoning=True),
    "apertus": JsonCalls(JsonLayout("<|tools_prefix|>[", after="]<|tools_suffix|>", object='{"NAME": ')),
    "phi": JsonCalls(JsonLayout("functools[", after="]")),
    "lfm2": PythonCalls(JsonLayout("<|tool_call_start|>[", after="]<|tool_call_end|>")),
    "llama4": PythonCalls(JsonLayout("[", after="]"), "<|python_start|>", close="<|python_end|>", is_bare=True),
    "olmo3": PythonCalls(JsonLayout("<function_calls>\n", after="\n</function_calls>", between="\n")),
    "gemma4": GemmaCalls(),
    "minimax-m3": ElementCalls(),
}
REASONING: Mapping[str, Reasoning] = {
    "think": Reasoning("<think>", "</think>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "harmony": Reasoning("<|channel|>", "<|end|>"),
    "muse": Reasoning("to=self<|message|>", "<|eom|>"),
    "inkling": Reasoning("<|content_thinking|>", "<|end_message|>"),
    "gemma4": Reasoning("<|channel>thought", "<channel|>"),
    "minimax-m3": Reasoning("<mm:think>", "</mm:think>"),
    "seed": Reasoning("<seed:think>", "</seed:think>"),
    "longcat": Reasoning("<longcat_think>", "</longcat_think>"),
    "solar": Reasoning("<|think:start|>", "<|think:end|>"),
    "cohere": Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    "granite": Reasoning("Here is my thought process:", "Here is my response:"),
    "hunyuan": Reasoning("<think>", "</think>", ("<answer>", "</answer>")),
    "ernie": Reasoning("<think>", "</think>", ("<response>", "</response>")),
    "kimi-k3": Reasoning(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
}


@cache
def calls_of(name: str, suffix: str = "") -> CallShape | None:
    """Return the calls of a family, None for `none`. suffix: in the tags of the vocabulary."""
    shape = CALLS.get(name)
    return TaggedCalls(shape.layout.suffixed(suffix)) if suffix and isinstance(shape, TaggedCalls) else shape


def reasoning_of(name: str, suffix: str = "") -> Reasoning | None:
    """Return the reasoning of a family; see `calls_of`."""
    found = REASONING.get(name)
    return found.suffixed(suffix) if suffix and found is not None else found


# Texts in a chat template that together name a family, the most special first.
_CALLS_IN_TEMPLATE: tuple[tuple[str, ...], ...] = (
    ("harmony", "<|channel|>"),
    ("muse", "<atem:function_calls>"),
    ("inkling", "<|content_invoke_tool_json|>"),
    ("gemma4", "<|tool_call>"),
    ("minimax-m3", "]<]minimax[>["),
    ("deepseek-v3.2", "｜DSML｜", "function_calls>"),
    ("deepseek-v4", "｜DSML｜", "tool_calls>"),
    ("deepseek-v4.1", "｜DSML｜"),
    ("minimax", "<minimax:tool_call>"),
    ("seed", "<seed:tool_call>"),
    ("zaya", "<zyphra_tool_call>"),
    ("longcat", "<longcat_tool_call>"),
    ("dots", "<dots_function_call>"),
    ("step3", "<steptml:invoke"),
    ("k2-horizon", "<ifm|tool_call"),
    ("solar", "<|tool_call:start|>"),
    ("kimi-k3", "<|open|>", "<|close|>"),
    ("cohere", "<|START_ACTION|>"),
    ("apertus", "<|tools_prefix|>"),
    ("hy", "<tool_sep"),
    ("glm", "<arg_key>"),
    ("mimo", "</function></tool_call>"),
    ("qwen3-coder", "<function="),
    ("deepseek", "<｜tool▁calls▁begin｜>"),
    ("kimi", "<|tool_calls_section_begin|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("hermes", "<tool_call>"),
    ("hunyuan", "<tool_calls>"),
    ("granite", "<|tool_call|>"),
    ("lfm2", "<|tool_call_start|>"),
    ("olmo3", "<function_calls>"),
    ("llama4", "[func_name1("),
    ("phi", "functools["),
    ("llama3", "<|python_tag|>"),
    ("llama3", '{"name": function name, "parameters":'),
)
_CALLS_OF_TYPE = {
    "gpt_oss": "harmony",
    "muse_spark": "muse",
    "inkling_mm_model": "inkling",
    "inkling2_text": "inkling",
    "gemma4": "gemma4",
    "lfm2_moe": "lfm2",
    "llama4": "llama4",
    "minimax_m2": "minimax",
    "minimax_m3_vl": "minimax-m3",
    "glm4_moe": "glm",
    "glm4_moe_lite": "glm",
    "glm4v_moe": "glm",
    "glm_moe_dsa": "glm",
    "glm5_next": "glm",
    "laguna": "glm",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek-v3.2",
    "deepseek_v4": "deepseek-v4",
    "kimi_k2": "kimi",
    "kimi_linear": "kimi",
    "kimi_k3": "kimi-k3",
    "granitemoe": "granite",
    "qwen3_5_moe": "qwen3-coder",
    "nemotron_h": "qwen3-coder",
    "step3p5": "qwen3-coder",
    "step3p7": "qwen3-coder",
    "mimo_v2_flash": "mimo",
    "zaya": "zaya",
    "mixtral": "mistral",
    "mistral4": "mistral",
    "mistral_large4": "mistral",
    "hy_v3": "hy",
    "hy_v4": "hy",
    "longcat_flash": "longcat",
    "dots3_note_text": "dots",
    "solar_open": "solar",
    "cohere2_moe": "cohere",
    "apertus": "apertus",
    "hunyuan_v1_moe": "hunyuan",
    "jamba": "hunyuan",
}
_REASONING_IN_TEMPLATE: tuple[tuple[str, ...], ...] = (
    ("harmony", "<|channel|>"),
    ("muse", "to=self<|message|>"),
    ("inkling", "<|content_thinking|>"),
    ("gemma4", "<|channel>"),
    ("minimax-m3", "<mm:think>"),
    ("seed", "<seed:think>"),
    ("longcat", "<longcat_think>"),
    ("solar", "<|think:start|>"),
    ("cohere", "<|START_THINKING|>"),
    ("apertus", "<|inner_prefix|>"),
    ("kimi-k3", "<|open|>", "<|close|>"),
    ("granite", "Here is my thought process:"),
    ("mistral", "[THINK]"),
    ("ernie", "<think>", "<response>"),
    ("think", "<think>"),
    ("think", "</think>"),
    # The vocabulary's suffix stands between.
    ("think", "<think", "<tool_sep"),
)
_REASONING_OF_TYPE = {
    "gpt_oss": "harmony",
    "muse_spark": "muse",
    "inkling_mm_model": "inkling",
    "inkling2_text": "inkling",
    "gemma4": "gemma4",
    "deepseek_v32": "think",
    "deepseek_v4": "think",
    "minimax_m3_vl": "minimax-m3",
    "hy_v3": "think",
    "hy_v4": "think",
    "kimi_k3": "kimi-k3",
    "solar_open": "solar",
    "cohere2_moe": "cohere",
}
# The types whose answers have a frame behind their reasoning.
_FRAMED = {"hunyuan_v1_moe": "hunyuan", "ernie4_5_moe": "ernie"}


def choose_families(templates: Sequence[str], model_type: str, calls: str, reasoning: str) -> tuple[str, str]:
    """Return the names of a checkpoint's families for calls and for reasoning; see `choose_shape`."""
    source = "\n".join(templates)
    if calls == "auto":
        # A template without a word of tools gets them explained, and calls are in hermes' form then.
        by_type = "hermes" if source and "tools" not in templates[-1] else _CALLS_OF_TYPE.get(model_type, "hermes")
        calls = _named(_CALLS_IN_TEMPLATE, source) or by_type
    if reasoning == "auto":
        reasoning = _named(_REASONING_IN_TEMPLATE, source) or _REASONING_OF_TYPE.get(model_type, "none")
        reasoning = _FRAMED.get(model_type, reasoning) if reasoning == "think" else reasoning
    return calls, reasoning


def _named(table: Sequence[tuple[str, ...]], source: str) -> str:
    return next((name for name, *texts in table if all(text in source for text in texts)), "")
