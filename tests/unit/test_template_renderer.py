"""Tokenizers and templates of hostile folders: one sentence at start, a 400 in a request, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import frontend_main
from moeserve.frontend.http import ApiError
from moeserve.frontend.job_process import JobProcesses
from moeserve.frontend.template_renderer import TemplateRenderer, check_model_texts, render_job
from moeserve.model.spec import ModelError
from tests.support.frontend import run_context
from tests.support.tiny_model import write_model_dir

SPINS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set ns = namespace(x='ab') %}{% for i in range(31) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_model_texts(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_sound_folder_passes(folder: Path) -> None:
    check_model_texts(folder)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ 'a' * 15000000000 }}", "chat template of .* cannot be used: it takes too much memory"),
        ("{{ '%1000000000d' % 1 }}", "chat template of .* cannot be used: it takes too much memory"),
        pytest.param(SPINS, "The chat template of .* cannot be used: it takes too long", marks=pytest.mark.slow),
        ("{% if %}", "The chat template does not compile: Expected an expression"),
        ("{{ 1 }}" * 200_000, "has 1400000 characters"),
    ],
)
def test_a_template_that_takes_all_is_refused_at_start(template: str, sentence: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=sentence):
        check_model_texts(folder)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", b'{"version": "1.0", "mod', "tokenizer.json is not a usable tokenizer"),
        ("tokenizer.json", b"[]", "tokenizer.json is not a usable tokenizer"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json does not hold a JSON object"),
        ("tokenizer_config.json", b"\xef\xbb\xbf{}", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b'{"a": NaN}', "tokenizer_config.json is not valid JSON"),
        ("chat_template.jinja", b"caf\xe9", "chat_template.jinja is not text in UTF-8"),
    ],
)
def test_a_damaged_file_is_one_sentence(name: str, content: bytes, sentence: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    assert sentence in refusal(folder)


def test_a_tokenizer_that_aborts_its_library_is_one_sentence(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    path.write_text(json.dumps(tokenizer))
    assert "tokenizer" in refusal(folder)


def test_a_list_of_templates_may_hold_anything(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": [1, "x", {"name": "default", "template": "y"}]}')
    check_model_texts(folder)


def test_the_frontend_leaves_its_sentence_to_the_supervisor(tmp_path: Path) -> None:
    run = run_context(tmp_path)
    Path(run.model_dir, "tokenizer.json").write_text("{")
    reading, writing = os.pipe()
    status = frontend_main.main([str(run.save()), "--fd", str(writing)])
    os.close(reading)
    assert status == frontend_main.EXIT_MODEL
    assert "tokenizer.json is not a usable tokenizer" in run.frontend_failure.read_text()


def rendered(folder: Path, use: Callable[[TemplateRenderer], Awaitable[None]]) -> None:
    async def run() -> None:
        renderer = TemplateRenderer(folder)
        try:
            await use(renderer)
        finally:
            await renderer.stop()

    asyncio.run(run())


def said(text: str, **variables: Any) -> bytes:
    arguments = {**variables, "add_generation_prompt": True, "tools": None}
    return render_job([{"role": "user", "content": text}], arguments)


def test_conversations_are_rendered_beside_the_event_loop(folder: Path) -> None:
    async def use(renderer: TemplateRenderer) -> None:
        texts = await asyncio.gather(*(renderer.render(said(f"number {n} \u00e9")) for n in range(5)))
        assert texts == [f"<|bos|><|user|>number {n} \u00e9<|end|><|assistant|>" for n in range(5)]

    rendered(folder, use)


def test_numbers_of_any_size_reach_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ budget }}")

    async def use(renderer: TemplateRenderer) -> None:
        assert await renderer.render(said("x", budget=2**70)) == str(2**70)

    rendered(folder, use)


def test_variables_may_have_any_name(folder: Path) -> None:
    async def use(renderer: TemplateRenderer) -> None:
        assert "hi" in await renderer.render(said("hi", **{"self": 1, "template": 2, "args": 3}))

    rendered(folder, use)


GO_WRONG = [
    (SPINS, "takes too long"),
    (DOUBLES, "Memory|too long"),
    ("{{ strftime_now('%Y' * (200000000 * messages | length)) }}", "Memory|too long"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses these messages: RecursionError"),
    ("{{ messages[0].content.encode('ascii') }}", "refuses these messages: UnicodeEncodeError"),
    ("{{ '\\ud800' }}", "text that is not Unicode"),
    ("{{ raise_exception('no') }}", "refuses these messages: no"),
    ("{% for i in range(1000000) %}{% endfor %}", "refuses these messages: OverflowError"),
    ("{{ 'a' * (33000000 * messages | length) }}", "The rendered messages are too long"),
]


@pytest.mark.slow
def test_a_render_that_goes_wrong_is_an_error_of_its_request_alone(folder: Path) -> None:
    cases = [f"{{% elif messages[0].content == 'bad {n} \u00e9' %}}{bad}" for n, (bad, _) in enumerate(GO_WRONG)]
    source = "{% if false %}" + "".join(cases) + "{% else %}{{ messages[0].content }}{% endif %}"
    (folder / "chat_template.jinja").write_text(source)
    check_model_texts(folder)

    async def use(renderer: TemplateRenderer) -> None:
        for number, (_, sentence) in enumerate(GO_WRONG):
            answers = await asyncio.gather(
                *(renderer.render(said(text)) for text in ("one", f"bad {number} \u00e9", "two")),
                return_exceptions=True,
            )
            assert answers[::2] == ["one", "two"]
            assert isinstance(answers[1], ApiError)
            assert answers[1].status == 400
            assert re.search(sentence, answers[1].message)

    rendered(folder, use)


def test_a_client_that_leaves_costs_the_next_one_nothing(folder: Path) -> None:
    async def use(renderer: TemplateRenderer) -> None:
        leaving = asyncio.ensure_future(renderer.render(said("left")))
        await asyncio.sleep(0)
        leaving.cancel()
        assert "stayed" in await renderer.render(said("stayed"))

    rendered(folder, use)


@pytest.mark.slow
def test_a_template_that_spins_for_one_holds_up_no_other(folder: Path) -> None:
    source = "{% if messages[0].content == 'spin' %}" + SPINS + "{% else %}{{ messages[0].content }}{% endif %}"
    (folder / "chat_template.jinja").write_text(source)

    async def use(renderer: TemplateRenderer) -> None:
        await renderer.start()
        spinning = asyncio.ensure_future(renderer.render(said("spin")))
        assert [await renderer.render(said(text)) for text in ("one", "two")] == ["one", "two"]
        assert not spinning.done()
        with pytest.raises(ApiError, match="takes too long"):
            await spinning

    rendered(folder, use)


def test_an_answer_beyond_its_bound_ends_the_process_and_the_next_job_has_another(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")

    async def use() -> None:
        processes = JobProcesses("moeserve.frontend.template_process", [str(folder)], 1, max_answer_bytes=6)
        try:
            answers = [await processes.ask(said(text)) for text in ("a" * 5, "b" * 6, "c" * 5)]
            assert answers == [b"\0aaaaa", None, b"\0ccccc"]
        finally:
            await processes.stop()

    asyncio.run(use())
