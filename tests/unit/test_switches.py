"""Which fields of a request change nothing because the checkpoint's chat template does not read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.parsers.shape import PLAIN, OutputShape
from moeserve.frontend.prepare.prepare import Preparer, make_programs
from moeserve.frontend.prepare.templates import load_chat_template
from moeserve.frontend.prepare.text_messages import Ask, Kind, Prepared, Watch
from moeserve.frontend.text import TextTokenizer
from tests.support.tiny_model import TEMPLATE, write_model_dir

FACTS = ModelFacts(("tiny",), 512, 300, (3,), {}, 20)
SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[Kind, dict[str, Any]] = {
    "chat": {"messages": SAID},
    "responses": {"input": "hi"},
    "messages": {"messages": SAID, "max_tokens": 4},
}


def ignored(
    folder: Path, kind: Kind, *, reads: str = "", shape: OutputShape = PLAIN, facts: ModelFacts = FACTS, **fields: Any
) -> tuple[str, ...]:
    """Return the names of the fields that are passed over. reads: the name of a variable in the template."""
    model = write_model_dir(folder / "model", TEMPLATE + (f"{{{{ {reads} or '' }}}}" if reads else ""))
    tokenizer, watch = TextTokenizer.from_file(model / "tokenizer.json"), Watch()
    programs = make_programs(model, tokenizer, load_chat_template(model), watch)
    body = {"model": "tiny", **BODIES[kind], **fields}
    prepared = Preparer(tokenizer, shape, watch, programs).prepare(Ask(kind, facts), json.dumps(body).encode())
    assert isinstance(prepared, Prepared)
    return prepared.request.ignored


@pytest.mark.parametrize(
    ("kind", "path", "fields"),
    [
        ("chat", "reasoning_effort", {"reasoning_effort": "low"}),
        ("responses", "reasoning.effort", {"reasoning": {"effort": "low"}}),
        ("messages", "output_config.effort", {"output_config": {"effort": "low"}}),
    ],
)
def test_an_effort_is_named_where_neither_the_template_nor_a_budget_follows_it(
    tmp_path: Path, kind: Kind, path: str, fields: dict[str, Any]
) -> None:
    assert ignored(tmp_path, kind, **fields) == (path,)
    assert ignored(tmp_path, kind, reads="reasoning_effort", **fields) == ()
    mapped = replace(FACTS, mapped_efforts=("low",))
    thinker = OutputShape("hermes", "think")
    assert ignored(tmp_path, kind, shape=thinker, facts=mapped, **fields) == ()
    assert ignored(tmp_path, kind, shape=thinker, **fields) == (path,)
    assert ignored(tmp_path, kind, facts=mapped, **fields) == (path,)


def test_the_effort_none_is_followed_by_a_template_that_can_do_without_thoughts(tmp_path: Path) -> None:
    assert ignored(tmp_path, "chat", reads="enable_thinking", reasoning_effort="none") == ()
    assert ignored(tmp_path, "chat", reads="enable_thinking", reasoning_effort="low") == ("reasoning_effort",)


def test_variables_that_the_template_does_not_read_are_named(tmp_path: Path) -> None:
    asked = {"style": "terse", "enable_thinking": False}
    told = ignored(tmp_path, "chat", reads="style", chat_template_kwargs=asked)
    assert told == ("chat_template_kwargs.enable_thinking",)
