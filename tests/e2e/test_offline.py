"""`from moeserve import LLM`: a model for scripts, with real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from launcher.offline import RequestRefused
from launcher.own_service import ServiceNotStarted
from moeserve import LLM
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    run_root = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(run_root))
        patch.setenv("OMP_NUM_THREADS", "1")
        model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
        with LLM(model, kv_cache_memory="64MiB", enable_prefix_caching=True, max_num_seqs=2) as running:
            yield running
    assert list(run_root.iterdir()) == []


def test_prompts_are_continued_in_their_order(llm: LLM) -> None:
    prompts = ["hello", [104, 101, 108, 108, 111], *(f"number {number}" for number in range(20))]
    answers = llm.generate(prompts, max_tokens=6, temperature=0, ignore_eos=True)
    alone = [llm.generate(prompt, max_tokens=6, temperature=0, ignore_eos=True)[0] for prompt in prompts]
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert answers[0].text == answers[1].text
    assert {(answer.num_tokens, answer.finish_reason) for answer in answers} == {(6, "length")}


def test_a_conversation_is_answered_in_the_form_that_is_asked_for(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    (answer,) = llm.chat([{"role": "user", "content": "how old"}], max_tokens=100, response_format=wanted, seed=1)
    assert json.loads(answer.text)["age"] in (1, 2)
    assert answer.body["choices"][0]["message"]["content"] == answer.text


def test_the_first_refused_prompt_is_named(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="maximum context length") as caught:
        llm.generate(["short", [1] * 100_000], max_tokens=2)
    assert (caught.value.number, caught.value.status) == (1, 400)
    with pytest.raises(RequestRefused, match="stream"):
        llm.chat([{"role": "user", "content": "hi"}], stream=True)


def test_why_a_model_does_not_start_is_said_once_in_the_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServiceNotStarted, match=r"exit code \d\): .*max-model-len"):
        LLM("demo", max_model_len="much")
    assert "max-model-len" not in capfd.readouterr().err
