"""Tokenizers and templates of hostile folders: one sentence at start, a 400 in a request, and nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from launcher import frontend_main
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.dialects.responses_items import Earlier
from moeserve.frontend.errors import ApiError
from moeserve.frontend.parsers.shape import PLAIN
from moeserve.frontend.prepare.prepare import NotHere, Preparer
from moeserve.frontend.prepare.text_messages import Ask, Prepared, Reply, Stage, Watch
from moeserve.frontend.prepare.text_processes import TextProcesses, check_model_texts
from moeserve.frontend.text import TextTokenizer
from moeserve.model.spec import ModelError
from tests.support.frontend import run_context
from tests.support.tiny_model import EOS, byte_tokenizer, write_model_dir

SPINS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FACTS = ModelFacts(("tiny",), 4096, 260, (EOS,), {}, 20)
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
        ("{{ 'a' * 15000000000 }}", "too much memory"),
        ("{{ '%1000000000d' % 1 }}", "too much memory"),
        pytest.param(SPINS, "too long", marks=pytest.mark.slow),
        ("{% if %}", "Expected an expression"),
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
def test_a_damaged_tokenizer_or_template_is_one_sentence(
    name: str, content: bytes, sentence: str, folder: Path
) -> None:
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


def used(folder: Path, use: Callable[[TextProcesses], Awaitable[None]]) -> None:
    async def run() -> None:
        inline = Preparer(TextTokenizer(byte_tokenizer()), PLAIN, Watch())
        processes = TextProcesses(folder, "auto", "auto", inline, num_processes=2)
        processes.start()
        try:
            await use(processes)
        finally:
            await processes.stop()

    asyncio.run(run())


def chat(text: str, owner: bytes = b"", **fields: Any) -> tuple[Ask, bytes]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return Ask("chat", FACTS, owner), json.dumps(body).encode()


def text_of(reply: Reply) -> str:
    assert isinstance(reply, Prepared), reply
    return TextTokenizer(byte_tokenizer()).decode(reply.prompts[0], skip_special_tokens=False)


def test_conversations_are_prepared_beside_the_event_loop(folder: Path) -> None:
    async def use(processes: TextProcesses) -> None:
        replies = await asyncio.gather(*(processes.prepare(*chat(f"number {n} \u00e9")) for n in range(5)))
        assert [*map(text_of, replies)] == [f"<|bos|><|user|>number {n} \u00e9<|end|><|assistant|>" for n in range(5)]

    used(folder, use)


def test_a_small_body_without_template_or_grammar_needs_no_process(folder: Path) -> None:
    async def use(processes: TextProcesses) -> None:
        await processes.stop()
        ask = Ask("completions", FACTS)
        assert text_of(await processes.prepare(ask, b'{"model": "tiny", "prompt": "hi"}')) == "hi"

    used(folder, use)


def test_a_body_is_prepared_alike_on_the_event_loop_and_in_a_process(folder: Path) -> None:
    async def use(processes: TextProcesses) -> None:
        ask = Ask("completions", FACTS)
        body = {"model": "tiny", "prompt": ["hi", "h\u00e9"], "echo": True, "logprobs": 2, "logit_bias": {"7": 1.5}}
        small = json.dumps(body).encode()
        assert await processes.prepare(ask, small) == await processes.prepare(ask, small + b" " * 5000)

    used(folder, use)


@pytest.mark.parametrize(
    ("prompt", "code", "num_encoded"),
    [(["a"] * 9, "invalid_value", 0), (["a" * 50, "b"], "context_length_exceeded", 1)],
)
def test_a_request_that_is_refused_anyway_is_not_tokenised_whole(
    prompt: list[str], code: str, num_encoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = TextTokenizer.encode

    def noting(self: TextTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "encode", noting)
    ask = Ask("completions", replace(FACTS, max_model_len=40), max_choices=8)
    tokenizer = TextTokenizer(byte_tokenizer())
    tokenizer.longest_token = 100  # as if a few tokens could be the whole text
    refused = Preparer(tokenizer, PLAIN, Watch()).prepare(ask, json.dumps({"model": "tiny", "prompt": prompt}).encode())
    assert isinstance(refused, ApiError)
    assert (refused.code, len(encoded)) == (code, num_encoded)


class NotedWatch(Watch):
    """Notes how many characters each stage is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[Stage, int]] = []

    def enter(self, stage: Stage, num_chars: int = 0, field: str = "") -> None:
        self.entered.append((stage, num_chars))


def responses_ask() -> tuple[Ask, bytes]:
    """A short body that continues a long conversation, and what that has."""
    turn = json.dumps([{"role": "user", "content": "." * 10_000}]).encode()
    body = json.dumps({"model": "tiny", "input": "hi", "previous_response_id": "resp_1"}).encode()
    return Ask("responses", FACTS, b"key", earlier=Earlier([turn], {"msg_1": b"." * 500})), body


def test_the_time_to_read_a_body_is_by_what_it_refers_to_as_well() -> None:
    watch = NotedWatch()
    ask, body = responses_ask()
    preparer = Preparer(TextTokenizer(byte_tokenizer()), PLAIN, watch)
    with suppress(NotHere):
        preparer.prepare(ask, body)
    assert ask.num_earlier_bytes > 10_500
    assert watch.entered[0] == (Stage.READ, len(body) + ask.num_earlier_bytes)
    packed = gzip.compress(body)
    zipped = msgspec.structs.replace(ask, coding=b"gzip", max_bytes=1000)
    watch.entered.clear()
    with suppress(NotHere):
        preparer.prepare(zipped, packed)
    assert watch.entered[1] == (Stage.READ, len(body) + ask.num_earlier_bytes)


def test_a_long_conversation_is_read_whole_in_pieces(folder: Path) -> None:
    turn = json.dumps([{"role": "user", "content": "." * 1_000_000}]).encode()
    ask, body = responses_ask()
    ask = msgspec.structs.replace(ask, earlier=Earlier([turn]), model=replace(FACTS, max_model_len=2_000_000))

    async def use(processes: TextProcesses) -> None:
        assert len(text_of(await processes.prepare(ask, body))) > 1_000_000

    used(folder, use)


GO_WRONG = [
    (SPINS, "too long"),
    (DOUBLES, "Memory|too long"),
    ("{{ strftime_now('%Y' * (200000000 * messages | length)) }}", "Memory|too long"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ("{{ messages[0].content.encode('ascii') }}", "UnicodeEncodeError"),
    ("{{ '\\ud800' }}", "Unicode"),
    ("{{ raise_exception('no') }}", ": no$"),
    ("{% for i in range(1000000) %}{% endfor %}", "OverflowError"),
    ("{{ 'a' * (33000000 * messages | length) }}", "too long"),
]


@pytest.mark.slow
def test_a_render_that_goes_wrong_is_an_error_of_its_request_alone(folder: Path) -> None:
    cases = [f"{{% elif messages[0].content == 'bad {n} \u00e9' %}}{bad}" for n, (bad, _) in enumerate(GO_WRONG)]
    source = "{% if false %}" + "".join(cases) + "{% else %}{{ messages[0].content }}{% endif %}"
    (folder / "chat_template.jinja").write_text(source)
    check_model_texts(folder)

    async def use(processes: TextProcesses) -> None:
        for number, (_, sentence) in enumerate(GO_WRONG):
            texts = ("one", f"bad {number} \u00e9", "two")
            replies = await asyncio.gather(*(processes.prepare(*chat(text)) for text in texts))
            assert [text_of(reply) for reply in replies[::2]] == ["one", "two"]
            assert isinstance(replies[1], ApiError)
            assert (replies[1].status, replies[1].code) == (400, "chat_template_failed")
            assert re.search(sentence, replies[1].message)

    used(folder, use)


def test_a_schema_that_compiles_without_end_is_refused_and_the_next_is_not(folder: Path) -> None:
    endless = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]}

    def with_schema(schema: Any) -> tuple[Ask, bytes]:
        return chat("x", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})

    async def use(processes: TextProcesses) -> None:
        refused = await processes.prepare(*with_schema(endless))
        assert isinstance(refused, ApiError)
        assert "too long" in refused.message
        assert refused.param == "response_format.json_schema.schema"
        taken = await processes.prepare(*with_schema({"type": "integer"}))
        assert isinstance(taken, Prepared)
        assert taken.request.sampling.grammar is not None

    used(folder, use)


def test_a_client_that_leaves_costs_the_next_one_nothing(folder: Path) -> None:
    async def use(processes: TextProcesses) -> None:
        leaving = [asyncio.ensure_future(processes.prepare(*chat(f"left {n}"))) for n in range(5)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        assert "stayed" in text_of(await processes.prepare(*chat("stayed")))

    used(folder, use)


@pytest.mark.slow
def test_a_template_that_spins_for_one_key_holds_up_no_other(folder: Path) -> None:
    source = "{% if messages[0].content == 'spin' %}" + SPINS + "{% else %}{{ messages[0].content }}{% endif %}"
    (folder / "chat_template.jinja").write_text(source)

    async def use(processes: TextProcesses) -> None:
        refused = await processes.prepare(*chat("spin", b"bad"))
        assert isinstance(refused, ApiError)
        assert refused.code == "chat_template_failed"
        # From now on the key gets one process, however many it asks for.
        spinning = [asyncio.ensure_future(processes.prepare(*chat("spin", b"bad"))) for _ in range(3)]
        for text in ("one", "two"):
            assert text_of(await processes.prepare(*chat(text, b"good"))) == text
            assert not any(task.done() for task in spinning)
        for reply in await asyncio.gather(*spinning):
            assert isinstance(reply, ApiError)

    used(folder, use)


class Killed:
    """A text process that ends with each body while it reads."""

    async def connected(self) -> None:
        """It is there."""

    async def exchange(self, frame: Sequence[bytes]) -> tuple[Reply, float]:
        raise asyncio.IncompleteReadError(b"", 1)

    def end(self) -> bytes:
        return bytes((Stage.READ, 0))


def test_a_body_whose_process_is_killed_is_prepared_by_another_one(folder: Path) -> None:
    async def use(processes: TextProcesses) -> None:
        for worker in processes._workers:
            assert worker is not None
            worker.end()
        processes._workers[:] = [cast("Any", Killed()) for _ in processes._workers]
        assert "still" in text_of(await processes.prepare(*chat("still there")))

    used(folder, use)


def test_a_body_that_ends_two_processes_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(processes: TextProcesses) -> None:
        monkeypatch.setattr(processes._living_nursery(), "fork", lambda _: Killed())
        for place, worker in enumerate(processes._workers):
            assert worker is not None
            worker.end()
            processes._workers[place] = None
        reply = await processes.prepare(*chat("bad"))
        assert isinstance(reply, ApiError)
        assert reply.status == 400

    used(folder, use)


def test_a_process_that_was_killed_between_two_bodies_is_replaced(folder: Path) -> None:
    async def use(processes: TextProcesses) -> None:
        for worker in processes._workers:
            assert worker is not None
            await worker.connected()
            assert worker._pid_fd is not None
            signal.pidfd_send_signal(worker._pid_fd, signal.SIGKILL)
        assert "still" in text_of(await processes.prepare(*chat("still there")))

    used(folder, use)


def test_a_defect_of_a_process_is_one_line_of_the_log_and_an_error_of_its_request_alone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def use(processes: TextProcesses) -> None:
        ask, body = chat("good")
        with capture_logs() as lines:
            # No frontend sends such an ask.
            bad = await processes.prepare(msgspec.structs.replace(ask, kind=cast("Any", "nonsense")), body)
            assert "good" in text_of(await processes.prepare(ask, body))
        assert isinstance(bad, ApiError)
        assert (bad.status, bad.code) == (500, "internal_error")
        assert [line["event"] for line in lines] == ["text_process_failed"]
        assert lines[0]["exception"].startswith("Traceback (most recent call last):")

    used(folder, use)
    assert capfd.readouterr().err == ""


def test_a_nursery_that_was_killed_is_reaped_at_once(folder: Path) -> None:
    async def use(processes: TextProcesses) -> None:
        nursery = processes._living_nursery()
        nursery._process.kill()
        while nursery.lives:
            await asyncio.sleep(0)
        assert not Path(f"/proc/{nursery._process.pid}").exists()
        assert "still" in text_of(await processes.prepare(*chat("still there")))

    used(folder, use)
