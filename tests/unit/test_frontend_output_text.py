"""One choice from tokens to deltas: stop strings, what counts, log probabilities with their text."""

from moeserve.frontend.answer import OutputText
from moeserve.frontend.dialects.internal import Delta, TokenText
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import TokenLogprobs
from moeserve.wire import Output
from tests.support.tiny_model import END, byte_tokenizer

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
