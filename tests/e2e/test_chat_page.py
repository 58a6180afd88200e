"""The chat page beyond questions and answers: formulas, files, versions, settings of the model, searches, pictures."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.wire import Abort, unpack_token_ids
from radix_cache import Miss, MissReason
from tests.support.browser import Browser, Page, chromium, find_chromium
from tests.support.fake_engine import say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.pages import answered, ask, delta, prompts, sse, texts

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium-headless-shell"),
]
THINKER: dict[str, Any] = {
    "id": "tiny",
    "max_model_len": 512,
    "default_sampling": {"temperature": 0.6, "top_k": 20},
    "default_max_tokens": 1024,
    "thinking": {"can_be_off": True, "efforts": ["low", "high"]},
}
TALK = r"""Euler found $e^{i\pi}+1=0$; two of them cost $5 to $10.

$$\sum_{k=1}^{n} k = \frac{n(n+1)}{2} \qquad f(x) = \begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases}$$

```python
def area(r: float) -> float:
    return 3.14 * r**2  # about
```
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with chromium(PROGRAM, tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), engine={"default_sampling": {"temperature": 0.6}}) as running:
        yield running


def mathml(page: Page, source: str) -> Any:
    """The names of a formula's nodes with their texts, None for one that is not drawn."""
    return page.evaluate(
        "import('/pages/math.js').then(({ renderMath }) => { const of = (e) => e.children.length"
        " ? [e.tagName, ...[...e.children].map(of)] : e.textContent;"
        f" const made = renderMath({json.dumps(source)}, false); return made && of(made.firstChild); }})"
    )


@pytest.mark.parametrize(
    ("source", "tree"),
    [
        (r"\frac{a}{2}", ["mfrac", "a", "2"]),
        (r"x_i^{2}", ["msubsup", "x", "i", "2"]),
        (r"x^23", ["mrow", ["msup", "x", "2"], "3"]),
        (r"\sum_{i}^n", ["munderover", "∑", "i", "n"]),
        (r"\int_0^1", ["msubsup", "∫", "0", "1"]),
        (r"\sqrt[3]{x}", ["mroot", "x", "3"]),
        (r"f'", ["msup", "f", "\u2032"]),
        (r"\mathbb{R}\boldsymbol{\beta}", ["mrow", "\u211d", "β"]),
        (r"\left(\frac12\right)", ["mrow", "(", ["mfrac", "1", "2"], ")"]),
        (r"\text{if } 1,000", ["mrow", "if ", "1,000"]),
        (r"\begin{pmatrix}a&b\\c&d\end{pmatrix}", None),
        (r"\|x\|_2", ["mrow", "‖", "x", ["msub", "‖", "2"]]),
        (r"\hat y", ["mover", "y", "^"]),
        (r"\substack{a\\b}", ["mtable", ["mtr", "a"], ["mtr", "b"]]),
    ],
)
def test_formulas_become_mathml(chat: Page, source: str, tree: Any) -> None:
    found = mathml(chat, source)
    if tree is None:
        tree = ["mrow", "(", ["mtable", ["mtr", "a", "b"], ["mtr", "c", "d"]], ")"]

    def cells(node: Any) -> Any:
        """Without the nodes that only hold one."""
        if isinstance(node, str):
            return node
        name, *children = node
        return cells(children[0]) if name == "mtd" else [name, *map(cells, children)]

    assert cells(found) == tree


@pytest.mark.parametrize(
    "source", [r"\unknown{x}", "{x", "x}", r"\frac{a}", r"\left(x", r"\begin{a}x\end{b}", "{" * 99]
)
def test_what_is_no_formula_stays_as_it_was_written(chat: Page, source: str) -> None:
    assert mathml(chat, source) is None
    text = json.dumps(rf"so \({source}\)")
    shown = chat.evaluate(
        "import('/pages/markdown.js').then(({ MarkdownView }) => { const view = new MarkdownView();"
        f" view.update({text}); return view.root.textContent; }})"
    )
    assert source.strip() in shown


def test_an_answer_shows_formulas_and_colours_and_leaves_amounts_of_money_alone(chat: Page, server: Frontend) -> None:
    server.engine.script = say(TALK, chunk=5)
    ask(chat, "hi")
    answered(chat)
    assert chat.evaluate("[...document.querySelectorAll('.markdown math')].map((e) => e.getAttribute('display'))") == [
        "inline",
        "block",
    ]
    assert "two of them cost $5 to $10." in chat.text(".markdown p")
    assert texts(chat, ".code-keyword") == ["def", "return"]
    assert texts(chat, ".code-comment") == ["# about"]


@pytest.mark.parametrize("piece", ["$", "$$", "$a ", "\\\\(", "\\\\[\\n", "$$\\n", "\\\\frac", "{", "$a$"])
def test_formulas_of_any_kind_take_linear_time(chat: Page, piece: str) -> None:
    rendered = chat.evaluate(
        f"import('/pages/markdown.js').then(({{ MarkdownView }}) => {{ const view = new MarkdownView();"
        f' view.update("{piece}".repeat(30000)); return view.root.textContent.length; }})'
    )
    assert rendered >= 0


@pytest.mark.parametrize("language", ["python", "js", "rust", "html", "sql", "bash", "yaml", "diff"])
def test_colours_never_change_a_text_and_take_linear_time(chat: Page, language: str) -> None:
    code = '"\'`/*<!--#\\ x = 1 // \n"""' * 4000
    same = chat.evaluate(
        "import('/pages/highlight.js').then(({ highlight }) => {"
        f" const code = {json.dumps(code)}; const root = document.createElement('div');"
        f" root.append(...highlight(code, {json.dumps(language)})); return root.textContent === code; }})"
    )
    assert same is True


def test_versions_of_an_answer_are_kept_with_what_followed_them(chat: Page, server: Frontend) -> None:
    ask(chat, "hi")
    answered(chat)
    ask(chat, "more")
    answered(chat, 2)
    server.engine.script = say("Another")
    chat.click(".assistant footer button:last-child")
    chat.wait("document.querySelector('.assistant .markdown')?.textContent === 'Another'")
    answered(chat)
    assert texts(chat, ".versions .fact") == ["2/2"]
    chat.click(".versions [aria-label='Earlier version']")
    assert texts(chat, ".assistant .markdown") == ["Hello", "Hello"]
    assert texts(chat, ".versions .fact") == ["1/2"]
    chat.open(server.url + "/")
    chat.wait("document.querySelectorAll('.assistant').length === 2")
    chat.click(".versions [aria-label='Later version']")
    assert texts(chat, ".assistant .markdown") == ["Another"]


def test_a_changed_question_is_a_version_too(chat: Page) -> None:
    ask(chat, "one")
    answered(chat)
    chat.click(".user footer button:last-child")
    chat.evaluate("document.activeElement.select()")
    chat.type("changed")
    chat.press("Enter")
    chat.wait("document.querySelector('.user .body').textContent === 'changed'")
    answered(chat)
    chat.click(".user .versions [aria-label='Earlier version']")
    assert texts(chat, ".user .body") == ["one"]


def test_a_stopped_answer_keeps_its_figures_and_goes_on(chat: Page, server: Frontend) -> None:
    server.engine.script = trickle("so far")
    ask(chat, "hi")
    chat.wait("document.querySelector('.assistant .markdown')?.textContent === 'so far'")
    chat.press("Escape")
    answered(chat)
    server.engine.wait_for(Abort)
    facts = texts(chat, ".assistant .fact")
    assert facts[0] == "stopped"
    assert [fact.split(" ")[0] for fact in facts[1:]] == ["TTFT", "6"]
    server.engine.script = say(" so good")
    going_on = "[...document.querySelectorAll('.assistant footer button')].find((b) => b.textContent === 'Continue')"
    chat.evaluate(f"{going_on}.click()")
    chat.wait("document.querySelector('.assistant .markdown').textContent === 'so far so good'")
    answered(chat)
    assert list(unpack_token_ids(prompts(server)[-1].token_ids)[-6:]) == list(b"so far")
    assert "stopped" not in texts(chat, ".assistant .fact")


def test_files_go_with_the_question_and_what_is_no_text_is_refused(chat: Page, server: Frontend) -> None:
    chat.evaluate(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['a = 1\\n'], 'a.py'));"
        " data.items.add(new File([new Uint8Array([0, 255])], 'x.png'));"
        " document.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})); })()"
    )
    chat.wait("document.querySelectorAll('#files li').length === 1")
    assert "is no text" in chat.text(".notice")
    chat.evaluate(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['%PDF-1.7'], 'a.PDF'));"
        " document.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})); })()"
    )
    chat.wait("document.querySelector('.notice').textContent.includes('is a PDF')")
    ask(chat, "what is this?")
    answered(chat)
    assert b"a.py\n```\na = 1\n```\n\nwhat is this?" in bytes(prompts(server)[0].token_ids[::4])
    assert texts(chat, ".attached summary .file") == ["a.py 2 lines"]
    assert chat.evaluate("document.querySelector('#files').hidden")


def test_conversations_are_searched_exported_and_imported(chat: Page) -> None:
    for text in ("about whales", "about stones"):
        chat.click("#new")
        ask(chat, text)
        answered(chat)
    chat.click("#search")
    chat.type("whales hello")
    assert texts(chat, "#conversations .title") == ["about whales"]
    chat.evaluate(
        "(() => { const e = document.querySelector('#search'); e.value = ''; e.dispatchEvent(new Event('input')); })()"
    )
    exported = json.dumps({"title": "from elsewhere", "messages": [{"role": "user", "content": "old"}]})
    for content in (exported, "no json", json.dumps({"messages": [{"role": "user", "content": {"x": 1}}]})):
        chat.evaluate(
            f"(() => {{ const data = new DataTransfer(); data.items.add(new File([{json.dumps(content)}], 'c.json'));"
            " const e = document.querySelector('#import-chooser'); e.files = data.files;"
            " e.dispatchEvent(new Event('change')); })()"
        )
        chat.wait("document.querySelector('#title').textContent === 'from elsewhere'")
    chat.wait("document.querySelector('.notice')?.textContent.includes('is no exported conversation')")
    assert texts(chat, ".user .body") == ["old"]
    assert len(texts(chat, "#conversations .title")) == 3


def test_empty_settings_show_what_the_model_does(chat: Page) -> None:
    assert chat.evaluate("document.querySelector('[name=temperature]').placeholder") == "0.6"
    assert chat.evaluate("document.querySelector('[name=top_p]').placeholder") == "1"
    assert chat.evaluate("document.querySelector('#thinking-settings').hidden")


def test_a_model_that_thinks_can_be_asked_to_think_less_or_not_at_all(browser: Browser, server: Frontend) -> None:
    page = browser.page()
    page.answer("/v1/models", (200, "application/json", json.dumps({"data": [THINKER]})))
    page.answer("/v1/chat/completions", sse(delta(reasoning="Hm."), delta(content="Yes."), delta("stop")))
    page.open(server.url + "/")
    page.wait("document.querySelector('#model-name').textContent === 'tiny'")
    options = "[...document.querySelector('[name=thinking]').options].map((option) => option.value)"
    assert page.evaluate(options) == ["", "none", "low", "high"]
    assert page.evaluate("document.querySelector('[name=max_tokens]').placeholder") == "1024"
    body = page.evaluate(
        "import('/pages/settings.js').then(({ requestBody }) =>"
        " requestBody({model: 'tiny', thinking: 'none', thinking_token_budget: '64'}, []))"
    )
    assert (body["reasoning_effort"], body["thinking_token_budget"]) == ("none", 64)
    ask(page, "hi")
    answered(page)
    assert texts(page, ".reasoning .plain") == ["Hm."]


def test_the_badge_says_why_the_cache_had_no_more_and_the_meter_how_full_the_context_is(
    chat: Page, server: Frontend
) -> None:
    miss = Miss(MissReason.DIVERGED, 3, 3, nearest_start=3, nearest=list(b"other"))
    server.engine.script = say("Hello", miss=miss)
    ask(chat, "hi")
    answered(chat)
    assert chat.text("#context-text") == "11 of 512 tokens"
    chat.click(".assistant .badge")
    assert "differs from the nearest prefix" in chat.text("dialog.report")
    assert "other" in chat.text("dialog.report dl")
    chat.press("Escape")
    chat.wait("!document.querySelector('dialog.report')")


def test_the_conversation_is_shown_as_a_request_for_curl_and_python(chat: Page) -> None:
    ask(chat, 'it\'s "me"')
    answered(chat)
    chat.click("#snippets")
    curl, python = texts(chat, "dialog.snippets pre")
    assert curl.startswith("curl http://127.0.0.1:")
    assert "it'\\''s" in curl
    compile(python, "snippet", "exec")
    assert "return_progress" not in python
    assert "stream" not in curl


def test_on_a_phone_a_new_conversation_is_one_tap_away(browser: Browser, server: Frontend) -> None:
    server.engine.script = say("Hello")
    page = browser.page(360, 740, phone=True)
    page.open(server.url + "/")
    ask(page, "hi")
    answered(page)
    page.click("#new-short")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0


@pytest.mark.parametrize("look", ["desktop", "phone", "dark"])
def test_pages_are_photographed_and_nothing_leaves_the_screen(
    browser: Browser, server: Frontend, tmp_path: Path, look: str
) -> None:
    """The pictures are in the folder that `MOESERVE_TEST_PICTURES` names, else in the test's own."""
    server.engine.script = say(TALK, chunk=9, miss=Miss(MissReason.NEVER_SEEN, 3, 3))
    size = (390, 844) if look == "phone" else (1200, 800)
    page = browser.page(*size, phone=look == "phone", dark=look == "dark")
    page.answer("/v1/models", (200, "application/json", json.dumps({"data": [THINKER]})))
    page.open(server.url + "/")
    page.wait("document.querySelector('#model-name').textContent === 'tiny'")
    ask(page, "What did Euler find?")
    answered(page)
    folder = Path(os.environ.get("MOESERVE_TEST_PICTURES") or tmp_path)
    page.screenshot(folder / f"chat-{look}.png")
    page.click("#settings-open")
    page.screenshot(folder / f"settings-{look}.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.problems == []
