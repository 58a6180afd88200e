"""What clients ask of the prompt cache: their spellings, key files, and token counts of the prefixes to keep."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from moeserve.config import ConfigError
from moeserve.frontend.dialects.chat import parse_warm
from moeserve.frontend.dialects.fields import SamplingBody, read_cache
from moeserve.frontend.dialects.internal import CacheOptions, ChatPrompt, GenerateRequest, ModelFacts
from moeserve.frontend.errors import ApiError
from moeserve.frontend.keys import ANYONE, Identity, cache_account, cache_namespace, load_keys
from moeserve.frontend.parsers.shape import PLAIN
from moeserve.frontend.prepare.prepare import READERS, Preparer, make_programs
from moeserve.frontend.prepare.templates import load_chat_template
from moeserve.frontend.prepare.text_messages import Ask, Prefix, Prepared, Watch
from moeserve.frontend.routes.cache import load_public_prefixes
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import CacheWish, SamplingParams
from radix_cache import account_of
from tests.support.refusals import refused
from tests.support.tiny_model import write_model_dir

SECRET = "5e" * 32
FACTS = ModelFacts(("tiny",), 512, 300, (), {}, 0)


def wishes(
    key: str | None, retention: str | None, options: dict[str, Any] | None, report: bool | None = None
) -> CacheOptions:
    names = ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_report")
    return read_cache(SamplingBody(**dict(zip(names, (key, retention, options, report), strict=True))))


@pytest.mark.parametrize(
    ("key", "retention", "options", "seconds"),
    [
        (None, None, None, None),
        ("agent", None, None, 600),
        (None, "in_memory", None, 600),
        ("agent", "24h", None, 86_400),
        (None, None, {}, 1800),
        (None, None, {"ttl": "5m"}, 300),
        ("agent", None, {"ttl": "90s"}, 600),
        (None, None, {"ttl": 45}, 45),
        (None, None, {"ttl": "1d", "mode": "implicit"}, 86_400),
        ("agent", "24h", {"mode": "explicit"}, None),
    ],
)
def test_the_longest_time_that_a_client_asks_for_counts(
    key: str | None, retention: str | None, options: dict[str, Any] | None, seconds: int | None
) -> None:
    assert wishes(key, retention, options) == CacheOptions(seconds=seconds)
    assert wishes(key, retention, options, True) == CacheOptions(seconds=seconds, report=True)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("x" * 1025, None, None), "prompt_cache_key"),
        ((None, "forever", None), "prompt_cache_retention"),
        ((None, None, {"ttl": "25h"}), "prompt_cache_options.ttl"),
        ((None, None, {"ttl": True}), "prompt_cache_options.ttl"),
        ((None, None, {"ttl": "0s"}), "prompt_cache_options.ttl"),
        ((None, None, {"ttl": 1.5}), "prompt_cache_options.ttl"),
        ((None, None, {"ttl": []}), "prompt_cache_options.ttl"),
        ((None, None, {"mode": "off"}), "prompt_cache_options.mode"),
        ((None, None, {"mode": ["off"]}), "prompt_cache_options.mode"),
        ((None, None, {"comparison_response_id": "r"}), "prompt_cache_options.comparison_response_id"),
    ],
)
def test_a_wrong_wish_is_refused_by_name(arguments: tuple[Any, Any, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        wishes(*arguments)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_key_file_gives_keys_shares_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("user:alice retention=0.25\nbob\nadmin:root   retention=1\n")
    keys = load_keys((), str(file))
    shares = {name: keys.find(name.encode()) for name in ("alice", "bob", "root")}
    assert {name: found and found.rights.retention for name, found in shares.items()} == {
        "alice": 0.25,
        "bob": None,
        "root": 1.0,
    }
    for wrong in ("2", "-1", "much", "nan", ""):
        file.write_text(f"alice retention={wrong}\n")
        with pytest.raises(ConfigError, match="retention="):
            load_keys((), str(file))


def test_every_namespace_of_a_key_belongs_to_its_account() -> None:
    one = Identity(b"1" * 32, frozenset())
    account = cache_account(SECRET, one)
    assert account
    assert account_of(cache_namespace(SECRET, one, "")) == account
    assert account_of(cache_namespace(SECRET, one, "salt/y")) == account
    assert account_of(cache_namespace(SECRET, ANYONE, "salt")) == cache_account(SECRET, ANYONE) == ""


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "bye"},
]


def preparer(folder: Path) -> Preparer:
    model = write_model_dir(folder / "model")
    tokenizer, watch = TextTokenizer.from_file(model / "tokenizer.json"), Watch()
    return Preparer(tokenizer, PLAIN, watch, make_programs(model, tokenizer, load_chat_template(model), watch))


def token_ids(folder: Path, messages: list[dict[str, Any]], *, generates: bool = False) -> array[int]:
    """Return the token ids of a conversation."""
    body = {"messages": messages, "add_generation_prompt": generates}
    prefix = preparer(folder).prepare(Ask("prefix", FACTS), json.dumps(body).encode())
    assert isinstance(prefix, Prefix)
    assert prefix.token_ids is not None
    return prefix.token_ids


def wishes_of(
    folder: Path, options: CacheOptions, prompt: ChatPrompt | list[int], facts: ModelFacts = FACTS
) -> tuple[list[CacheWish] | None, array[int], array[int]]:
    """Return the wishes, the prompt's token ids, and the first message's token ids alone."""
    request = GenerateRequest(
        model="tiny", prompts=[prompt], sampling=SamplingParams(1), max_tokens=1, seed=0, cache=options
    )
    with patch.dict(READERS, {"chat": lambda body, facts: request}):
        prepared = preparer(folder).prepare(Ask("chat", facts), b"{}")
    assert isinstance(prepared, Prepared)
    return prepared.wishes, prepared.prompts[0], token_ids(folder, MESSAGES[:1])


def test_breakpoints_become_token_counts_of_the_rendered_prompt(tmp_path: Path) -> None:
    options = CacheOptions(seconds=60, breakpoints=((1, 3600), (4, 300)))
    wishes, ids, head = wishes_of(tmp_path, options, ChatPrompt(MESSAGES))
    assert ids[: len(head)] == head
    assert wishes == [CacheWish(((len(ids), 60), (len(head), 3600), (len(ids), 300)))]


def test_of_many_breakpoints_the_last_four_count(tmp_path: Path) -> None:
    options = CacheOptions(breakpoints=tuple((4, float(seconds)) for seconds in range(1, 8)))
    wishes, ids, _ = wishes_of(tmp_path, options, ChatPrompt(MESSAGES))
    assert wishes == [CacheWish(tuple((len(ids), float(seconds)) for seconds in range(4, 8)))]


def test_a_request_that_asks_nothing_of_the_cache_has_no_wish(tmp_path: Path) -> None:
    assert wishes_of(tmp_path, CacheOptions(), [1, 2, 3])[0] is None
    assert wishes_of(tmp_path, CacheOptions(report=True), [1, 2, 3])[0] == [CacheWish((), True)]


def test_models_with_states_are_told_where_messages_end(tmp_path: Path) -> None:
    facts = replace(FACTS, keeps_states=True)
    wishes, ids, head = wishes_of(tmp_path, CacheOptions(), ChatPrompt(MESSAGES), facts)
    talk = token_ids(tmp_path, MESSAGES)
    assert ids[: len(talk)] == talk != ids
    assert wishes == [CacheWish((), False, (len(head), len(talk)))]


def test_prompts_without_messages_or_a_head_of_the_answer_have_no_border(tmp_path: Path) -> None:
    facts = replace(FACTS, keeps_states=True)
    assert wishes_of(tmp_path, CacheOptions(), [1, 2, 3], facts)[0] == [CacheWish(())]
    continued = ChatPrompt(MESSAGES[1:3], add_generation_prompt=False, continue_final=True)
    assert wishes_of(tmp_path, CacheOptions(), continued, facts)[0] == [CacheWish(())]


PREFIXES = ({"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"})


@pytest.mark.parametrize("prefix", PREFIXES, ids=["messages", "prompt"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("max_tokens", 5),
        ("stop", ["x"]),
        ("n", 2),
        ("stream", True),
        ("logprobs", True),
        ("logit_bias", {"1": 1}),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_warming_refuses_fields_that_have_no_effect_on_a_prefix(prefix: dict[str, Any], name: str, value: Any) -> None:
    with refused("unsupported_parameter", name) as caught:
        parse_warm(json.dumps({**prefix, name: value}).encode(), FACTS)
    assert caught.value.status == 400


def test_fields_that_render_messages_have_no_effect_on_a_text() -> None:
    with pytest.raises(ApiError) as caught:
        parse_warm(b'{"prompt": "hi", "reasoning_effort": "low"}', FACTS)
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("prefix", PREFIXES, ids=["messages", "prompt"])
def test_warming_takes_what_counts_and_what_asks_for_nothing(prefix: dict[str, Any]) -> None:
    counts = {"cache_salt": "s", "priority": 2, "prompt_cache_retention": "24h", "cache_report": True}
    nothing: dict[str, Any] = {"stream": False, "temperature": None, "n": 1, "tool_choice": "auto", "stop": []}
    request = parse_warm(json.dumps({**prefix, **counts, **nothing}).encode(), FACTS)
    assert (request.cache_salt, request.priority, request.max_tokens) == ("s", 2, 1)
    assert request.cache == CacheOptions(seconds=86_400, report=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "no JSON list"),
        ("[", "no JSON list"),
        ("[1]", "public prefix 0"),
        ('[{"prompt": "a"}, {}]', "public prefix 1 .* Give either `prompt` or `messages`"),
        ('[{"prompt": "a", "cache_salt": "s"}]', "`cache_salt` has no effect"),
        ('[{"prompt": "a", "prefix": 1}]', "unknown field 'prefix'"),
        ('[{"prompt": 1}]', "public prefix 0"),
    ],
)
def test_a_wrong_file_of_public_prefixes_is_refused_in_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "public.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_public_prefixes(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        load_public_prefixes(str(tmp_path / "none.json"))
