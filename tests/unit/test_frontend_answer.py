"""From a request to the engine's requests, and from the engine's outputs to text, deltas and usage."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from moeserve.config import ServeConfig
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    GenerateRequest,
    TokenText,
    Tool,
    ToolChoice,
    openai_usage,
)
from moeserve.frontend.errors import ApiError, longest_output
from moeserve.frontend.exchange import build_generates, derive_seed
from moeserve.frontend.parsers.counting import Thoughts
from moeserve.frontend.parsers.shape import PLAIN, OutputShape
from moeserve.frontend.prepare.text_messages import Prepared
from moeserve.frontend.relay.answer import Answer, OutputText
from moeserve.frontend.text import TextTokenizer, decode_prompt
from moeserve.plan import FinishReason, SamplingParams, TokenLogprobs
from moeserve.wire import Output, unpack_token_ids
from tests.support.refusals import refused
from tests.support.tiny_model import BOS, END, byte_tokenizer

TOKENIZER = TextTokenizer(byte_tokenizer())


def run(text: OutputText, tokens: list[int], chunk: int = 1, end: str = "length") -> Delta:
    """Feeds tokens, finishes, and joins all deltas."""
    whole = Delta(0)
    for start in range(0, len(tokens), chunk):
        ids = tokens[start : start + chunk]
        delta = text.push(Output("r", ids, logprobs=[TokenLogprobs(-float(token_id)) for token_id in ids]))
        whole.text += delta.text
        whole.tokens += delta.tokens
    last = text.push(Output("r"))
    text.finish(last, end)
    return Delta(0, whole.text + last.text, whole.tokens + last.tokens, last.finish_reason)


def test_a_stop_string_across_tokens_ends_the_text_and_says_what_counts() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["STOP"])
    answer = run(text, list(b"abSTOPcd"))
    assert (answer.text, answer.finish_reason, text.keep_tokens) == ("ab", "stop", 2)


def test_a_stop_string_inside_one_output_ignores_the_rest() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["ST"])
    assert (run(text, list(b"abSTcd"), chunk=6).text, text.num_tokens) == ("ab", 2)


def test_at_least_one_token_counts() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["a"])
    assert (run(text, list(b"abc")).text, text.keep_tokens) == ("", 1)


def test_held_back_text_comes_at_the_end() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["STOP"])
    answer = run(text, list(b"abST"))
    assert (answer.text, answer.finish_reason, text.keep_tokens) == ("abST", "length", None)


def test_no_stop_string_is_looked_for_before_min_tokens() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["a"], min_tokens=3)
    assert (run(text, list(b"aaabac")).text, text.keep_tokens) == ("aaab", 4)


def test_logprobs_cover_the_tokens_of_the_text_and_tell_their_offsets() -> None:
    answer = run(OutputText(0, TOKENIZER, [], wants_logprobs=True, offset=10), [*"é!".encode(), END])
    assert answer.tokens == [
        TokenText(0xC3, 10, TokenLogprobs(-195.0)),
        TokenText(0xA9, 10, TokenLogprobs(-169.0)),
        TokenText(ord("!"), 11, TokenLogprobs(-33.0)),
        TokenText(END, 12, TokenLogprobs(-float(END))),
    ]


def test_logprobs_do_not_tell_a_stop_string() -> None:
    answer = run(OutputText(0, TOKENIZER, [], stops=["STOP"], wants_logprobs=True), list(b"abSTOP"))
    assert [token.token_id for token in answer.tokens] == list(b"ab")


def test_logprobs_wait_for_their_text() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["STOP"], wants_logprobs=True)
    assert text.push(Output("r", list(b"S"))).tokens == []
    assert [token.token_id for token in text.push(Output("r", list(b"x"))).tokens] == list(b"Sx")


def request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "model": "tiny",
        "prompts": ["ab"],
        "sampling": SamplingParams(max_tokens=0),
        "max_tokens": 4,
        "seed": None,
    }
    return GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def showing(asked: GenerateRequest, prompt: list[int]) -> Answer:
    """An answer that shows its only prompt."""
    return Answer(asked, [prompt], TOKENIZER, prompt_texts=[decode_prompt(TOKENIZER, prompt)])


def test_offsets_of_a_prompts_tokens_are_places_in_the_text_that_came() -> None:
    special = TOKENIZER.special_token_ids
    text = "<|user|>hé<|end|>"
    begun = [BOS, *TOKENIZER.encode(text)]  # as a tokenizer that puts its own token before each text
    decoded = decode_prompt(TOKENIZER, begun, special, text)
    assert decoded.text == text
    assert list(decoded.offsets) == [0, 0, 8, 9, 9, 10]
    assert decode_prompt(TOKENIZER, begun).text == "hé"
    assert decode_prompt(TOKENIZER, begun, special).text == f"<|bos|>{text}"
    # A tokenizer that changes the text: no place is beyond its end.
    assert list(decode_prompt(TOKENIZER, list(b"abc"), special, "AB").offsets) == [0, 1, 2]


def test_a_prompt_that_leaves_no_token_is_told_with_both_counts() -> None:
    assert longest_output(10, 16) == 6
    assert longest_output(15, 16) == 1
    with refused("context_length_exceeded", None, "17", "16 in the prompt"):
        longest_output(16, 16)


@pytest.mark.parametrize(
    ("wanted", "got"), [(None, [14, 11]), (12, [12, 11]), (32_000, [14, 11]), (3, [3, 3]), (0, [1, 1])]
)
def test_more_tokens_than_the_context_leaves_are_cut_to_it(wanted: int | None, got: list[int]) -> None:
    asked, prompts = request(prompts=["ab", "abcde"], max_tokens=wanted), [[1, 2], [1, 2, 3, 4, 5]]
    generates = build_generates(Prepared(asked, prompts), answer_id="r", namespace="", seed=1, max_model_len=16)
    assert [generate.sampling.max_tokens for generate in generates] == got


def test_samples_have_seeds_of_their_own_and_the_first_one_the_clients() -> None:
    seeds = [derive_seed(7, sample) for sample in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16
    assert all(0 <= derive_seed(seed, sample) < 2**63 for seed in (-1, -(2**63), 2**63 - 1) for sample in (0, 1))


def test_every_choice_gets_a_message_of_its_own() -> None:
    prompts = [[1, 2], [3]]
    generates = build_generates(
        Prepared(request(prompts=["a", "b"], n=2, max_tokens=None, priority=3, seed=5), prompts),
        answer_id="r",
        namespace="ns",
        seed=5,
        max_model_len=8,
    )
    assert [generate.request_id for generate in generates] == ["r-0", "r-1", "r-2", "r-3"]
    assert [list(unpack_token_ids(generate.token_ids)) for generate in generates] == [[1, 2], [1, 2], [3], [3]]
    assert [generate.sampling.max_tokens for generate in generates] == [6, 6, 7, 7]
    assert generates[0].sampling.seed == generates[2].sampling.seed == 5
    assert {(generate.namespace, generate.priority) for generate in generates} == {("ns", 3)}


def test_without_a_clients_seed_every_text_of_a_request_is_a_draw_of_its_own() -> None:
    asked = request(prompts=["a"] * 8, n=2)
    generates = build_generates(Prepared(asked, [[1]] * 8), answer_id="r", namespace="", seed=5, max_model_len=8)
    assert len({generate.sampling.seed for generate in generates}) == 16


def test_usage_counts_a_prompt_once_and_what_it_found_before_this_request() -> None:
    answer = Answer(request(n=2), [[1, 2, 3]], TOKENIZER)
    answer.take(0, Output("r-0", [97], num_cached_tokens=1))
    answer.take(1, Output("r-1", [97, 98], num_cached_tokens=2))
    answer.take(0, Output("r-0", [98], FinishReason.LENGTH, num_cached_tokens=3))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 1)
    assert answer.num_open == 1


def test_an_echoed_prompt_comes_first_with_the_probabilities_that_came_in_chunks() -> None:
    sampling = SamplingParams(max_tokens=0, logprobs=0, prompt_logprobs=0)
    answer = showing(request(prompts=["abc"], echo=True, sampling=sampling), list(b"abc"))
    assert answer.take(0, Output("r", prompt_logprobs=[TokenLogprobs(-1.0)])) == []
    output = Output("r", [100], prompt_logprobs=[TokenLogprobs(-2.0)], logprobs=[TokenLogprobs(-3.0)])
    echo, first = answer.take(0, output)
    assert echo.text == "abc"
    assert [token.logprobs and token.logprobs.logprob for token in echo.tokens] == [None, -1.0, -2.0]
    assert [token.offset for token in echo.tokens + first.tokens] == [0, 1, 2, 3]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_request_that_failed_in_the_engine_is_an_error_without_its_words(reason: FinishReason) -> None:
    with pytest.raises(ApiError) as caught:
        Answer(request(), [[1]], TOKENIZER).take(0, Output("r", [], reason, error="/secret/path.py line 3"))
    assert caught.value.status == 500
    assert "secret" not in caught.value.message


# Answers that are parsed.

CHAT = [ChatPrompt([{"role": "user", "content": "hi"}])]
WEATHER = (Tool("weather"),)
CALL = '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
THINKER = OutputShape("hermes", "think")


def answer_of(
    text: str | list[int], shape: OutputShape, prompt: list[int] | None = None, end: str = "stop", **changes: object
) -> tuple[Delta, Answer]:
    """All deltas of an answer, joined, one token an output."""
    prompt = prompt or [1]
    texts = [decode_prompt(TOKENIZER, prompt)]
    thoughts = Thoughts(TOKENIZER, shape, ServeConfig())
    answer = Answer(request(**{"prompts": CHAT, **changes}), [prompt], TOKENIZER, shape, texts, thoughts)
    whole = Delta(0)
    ids = list(text.encode()) if isinstance(text, str) else text
    for token_id in ids:
        for delta in answer.take(0, Output("r-0", [token_id], logprobs=[TokenLogprobs(-1.0)])):
            whole.append(delta)
        if answer.finishes:
            break
    for delta in answer.take(0, Output("r-0", finish_reason=FinishReason(end))):
        whole.append(delta)
    return whole, answer


def test_reasoning_text_and_calls_are_told_apart_and_counted() -> None:
    whole, answer = answer_of(f"<think>hm</think>Look.\n{CALL}", THINKER, tools=WEATHER)
    assert (whole.reasoning, whole.text, whole.finish_reason) == ("hm", "Look.", "tool_calls")
    assert [(call.name, call.arguments) for call in whole.calls] == [("weather", '{"a": 1}')]
    assert answer.usage.reasoning_tokens == len("hm")


@pytest.mark.parametrize(("start", "begin"), [([1], "<think>"), (list(b"<think>"), "")])
def test_the_tokens_of_a_call_inside_a_thought_are_no_reasoning(start: list[int], begin: str) -> None:
    for end in ("", "</think>\n\n"):
        whole, answer = answer_of(f"{begin}h\u00e9.\n{CALL}{end}", THINKER, start, tools=WEATHER)
        assert (whole.reasoning, whole.text, whole.finish_reason) == ("h\u00e9.", "", "tool_calls")
        assert [(call.name, call.arguments) for call in whole.calls] == [("weather", '{"a": 1}')]
        assert answer.usage.reasoning_tokens == len("h\u00e9.\n".encode())
    whole, answer = answer_of(f"{begin}{CALL} maybe</think>Yes", THINKER, start, tools=WEATHER)
    assert (whole.text, answer.usage.reasoning_tokens) == ("Yes", len(f"{CALL} maybe"))


def test_an_answer_cut_by_length_says_so_even_with_a_call() -> None:
    assert answer_of(CALL, THINKER, end="length", tools=WEATHER)[0].finish_reason == "length"


@pytest.mark.parametrize(
    "changes", [{}, {"tools": WEATHER, "tool_choice": ToolChoice("none")}, {"tools": WEATHER, "prompts": ["hi"]}]
)
def test_calls_are_looked_for_only_where_the_model_may_make_any(changes: dict[str, object]) -> None:
    whole, _ = answer_of(CALL, OutputShape("hermes"), **changes)
    assert (whole.text, whole.calls, whole.finish_reason) == (CALL, [], "stop")


def test_reasoning_that_the_prompt_opened_needs_no_marker() -> None:
    whole, _ = answer_of("hm</think>Yes.", THINKER, list(b"<think>\n"))
    assert (whole.reasoning, whole.text) == ("hm", "Yes.")
    whole, _ = answer_of("Yes.", THINKER, list(b"<think>\n\n</think>\n\n"))
    assert (whole.reasoning, whole.text) == ("", "Yes.")


def test_a_continued_message_is_text_unless_its_reasoning_is_open() -> None:
    for content, reasoning, text in (("Well", "", "hm</think>y"), ("<think>so", "hm", "y")):
        prompt = ChatPrompt([{"role": "assistant", "content": content}], continue_final=True)
        whole, _ = answer_of("hm</think>y", THINKER, prompts=[prompt])
        assert (whole.reasoning, whole.text) == (reasoning, text)


def test_stop_strings_are_looked_for_in_text_alone() -> None:
    said = f"<think>STOP</think>abSTOPcd{CALL}"
    whole, answer = answer_of(said, THINKER, tools=WEATHER, stop=("STOP",))
    assert (whole.reasoning, whole.text, whole.finish_reason, whole.calls) == ("STOP", "ab", "stop", [])
    assert answer.finishes == [(0, len("<think>STOP</think>ab"))]
    assert answer.usage.completion_tokens == len("<think>STOP</think>ab")
    in_arguments = CALL.replace("1", '"STOP"')
    whole, _ = answer_of(in_arguments, THINKER, tools=WEATHER, stop=("STOP",))
    assert (whole.finish_reason, whole.calls[0].arguments) == ("tool_calls", '{"a": "STOP"}')


def test_a_stop_string_is_shown_on_request() -> None:
    for shape in (PLAIN, THINKER):
        whole, answer = answer_of("abSTOPcd", shape, stop=("STOP",), include_stop=True)
        assert (whole.text, whole.finish_reason) == ("abSTOP", "stop")
        assert answer.finishes == [(0, 6)]


def test_special_tokens_show_on_request() -> None:
    assert answer_of([97, END], PLAIN)[0].text == "a"
    assert answer_of([97, END], PLAIN, skip_special_tokens=False)[0].text == "a<|end|>"
    assert answer_of([97, END], THINKER, skip_special_tokens=False)[0].text == "a<|end|>"


def test_markers_that_are_special_tokens_reach_the_parser_and_nobody_else() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]", "[other]")])
    text_tokenizer = TextTokenizer(tokenizer)
    said = 'Look.[other][TOOL_CALLS]weather[ARGS]{"a": 1}'
    answer = Answer(request(prompts=CHAT, tools=WEATHER), [[1]], text_tokenizer, OutputShape("mistral"))
    ids = text_tokenizer.encode(said)
    whole = Delta(0)
    for delta in answer.take(0, Output("r-0", ids, FinishReason.STOP)):
        whole.append(delta)
    assert (whole.text, whole.finish_reason) == ("Look.", "tool_calls")
    assert [(call.name, call.arguments) for call in whole.calls] == [("weather", '{"a": 1}')]
    stray = Answer(request(prompts=CHAT, tools=WEATHER), [[1]], text_tokenizer, OutputShape("mistral"))
    (delta,) = stray.take(0, Output("r-0", text_tokenizer.encode("a[ARGS]b"), FinishReason.STOP))
    assert (delta.text, delta.finish_reason) == ("ab", "stop")


def test_special_tokens_inside_longer_markers_reach_the_parser_and_nobody_else() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|open|>", "<|close|>", "<|sep|>")])
    text_tokenizer = TextTokenizer(tokenizer)
    shape = OutputShape("kimi-k3", "kimi-k3")
    said = (
        "hm<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="weather" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
    )
    for tools, calls in ((WEATHER, ["weather"]), ((), [])):
        prompt = text_tokenizer.encode("<|open|>think<|sep|>")
        answer = Answer(request(prompts=CHAT, tools=tools), [prompt], text_tokenizer, shape)
        kept = said if tools else said.partition("<|open|>tools")[0]
        whole = Delta(0)
        for delta in answer.take(0, Output("r-0", text_tokenizer.encode(kept), FinishReason.STOP)):
            whole.append(delta)
        assert (whole.reasoning, whole.text, [call.name for call in whole.calls]) == ("hm", "Ok.", calls)


def test_log_probabilities_of_parsed_answers_cover_every_token() -> None:
    sampling = SamplingParams(max_tokens=0, logprobs=0)
    whole, _ = answer_of(f"<think>hm</think>{CALL}", THINKER, tools=WEATHER, sampling=sampling)
    assert bytes(token.token_id for token in whole.tokens) == f"<think>hm</think>{CALL}".encode()


def test_a_chats_echo_is_the_text_that_is_continued() -> None:
    prompt = ChatPrompt([{"role": "assistant", "content": "Hel"}], continue_final=True)
    whole, _ = answer_of("lo", PLAIN, prompts=[prompt], echo=True)
    assert whole.text == "Hello"


def test_without_output_tokens_an_answer_is_its_prompt() -> None:
    sampling = SamplingParams(max_tokens=0, logprobs=0, prompt_logprobs=0)
    asked = request(prompts=["ab"], max_tokens=0, echo=True, sampling=sampling)
    (generate,) = build_generates(Prepared(asked, [[97, 98]]), answer_id="r", namespace="", seed=1, max_model_len=3)
    assert generate.sampling.max_tokens == 1
    answer = showing(asked, [97, 98])
    found = Output("r", [99], FinishReason.STOP, prompt_logprobs=[TokenLogprobs(-2.0)], logprobs=[TokenLogprobs(-1.0)])
    echo, last = answer.take(0, found)
    assert (echo.text, [token.token_id for token in echo.tokens]) == ("ab", [97, 98])
    assert (last.text, last.tokens, last.finish_reason) == ("", [], "length")
    assert answer.usage.completion_tokens == 0


def test_prompt_log_probabilities_come_with_the_end() -> None:
    sampling = SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=2)
    asked = request(prompts=["ab"], prompt_logprobs=2, sampling=sampling)
    answer = showing(asked, [97, 98])
    top = ((1, -0.5), (2, -0.75))
    deltas = answer.take(0, Output("r", [99], FinishReason.STOP, prompt_logprobs=[TokenLogprobs(-2.0, top)]))
    assert [token.logprobs for token in deltas[-1].prompt] == [None, TokenLogprobs(-2.0, top)]
    assert deltas[0].text == "c"


def test_an_echo_has_as_many_alternatives_as_the_answer() -> None:
    sampling = SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=2)
    asked = request(prompts=["ab"], prompt_logprobs=2, echo=True, sampling=sampling)
    answer = showing(asked, [97, 98])
    top = ((1, -0.5), (2, -0.75))
    echo, _ = answer.take(0, Output("r", [99], FinishReason.STOP, prompt_logprobs=[TokenLogprobs(-2.0, top)]))
    assert echo.tokens[1].logprobs == TokenLogprobs(-2.0, top[:1])


def test_the_best_of_several_are_given_by_mean_log_probability() -> None:
    asked = request(prompts=["a", "b"], n=3, best=2)
    answer = Answer(asked, [[97], [98]], TOKENIZER)

    def choice(index: int, *logprobs: float) -> Delta:
        return Delta(index, f"{index}", [TokenText(1, 0, TokenLogprobs(logprob)) for logprob in logprobs])

    choices = [
        choice(0, -3.0, -3.0),
        choice(1, -1.0, -1.0, -1.0, -1.0),
        choice(2, -2.0),
        choice(3),
        choice(4, -9.0),
        choice(5, -8.0),
    ]
    answer.keep(choices)
    assert [(found.index, found.text) for found in answer.choices()] == [(0, "1"), (1, "2"), (2, "5"), (3, "4")]
    other = Answer(request(), [[1]], TOKENIZER)
    other.keep(choices[:1])
    assert other.choices() == choices[:1]


def test_an_answer_that_went_on_in_another_engine_says_so() -> None:
    answer = Answer(request(), [[65]], TOKENIZER)
    assert answer.usage.extensions == {}
    assert "resumed" not in openai_usage(answer.usage)
    answer.resume()
    assert answer.usage.extensions == {"resumed": True}
    assert openai_usage(answer.usage)["resumed"] is True


def test_a_long_prompt_is_shown_in_several_parts() -> None:
    prompt = [97 + place % 20 for place in range(600)]
    asked = request(prompts=[prompt], echo=True, sampling=SamplingParams(0, logprobs=0))
    answer = showing(asked, prompt)
    found = [TokenLogprobs(-1.0)] * 599
    *parts, last = answer.take(0, Output("r", [98], prompt_logprobs=found, logprobs=[TokenLogprobs(-2.0)]))
    assert [len(part.tokens) for part in parts] == [256, 256, 88]
    assert "".join(part.text for part in parts) == bytes(prompt).decode()
    assert [token.offset for part in parts for token in part.tokens] == list(range(600))
    assert (last.text, last.tokens[0].offset) == ("b", 600)
