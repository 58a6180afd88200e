"""The pages in a headless Chromium, as people use them; the engine follows a script."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.plan import FinishReason
from moeserve.wire import Abort, Generate, Stats
from tests.support.browser import Browser, Page, chromium, find_chromium
from tests.support.fake_engine import compute, say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.pages import answered, ask, delta, prompts, sse, texts

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium-headless-shell"),
]
MARKDOWN = """# Title

Some **bold**, *slanted* and `code`, a [link](https://example.org/a) and <img src=x onerror=alert(1)>.
[bad](javascript:alert(1))

1. one
2. two
   - inner

| a | b |
|---|--:|
| 1 | 2 |

```python
print("<script>")
```
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with chromium(PROGRAM, tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend")) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text("metrics:prom\nuser:bob\n")
    with frontend(folder, api_key_file=str(folder / "keys")) as running:
        yield running


def test_an_answer_comes_with_its_figures(chat: Page) -> None:
    ask(chat, "hi")
    answered(chat)
    assert chat.text(".user .body") == "hi"
    assert chat.text(".assistant .markdown") == "Hello"
    facts = " ".join(texts(chat, ".assistant .fact"))
    assert "TTFT" in facts
    assert "5 tokens" in facts
    assert chat.text(".assistant .badge") == "3 of 6 cached"
    assert chat.evaluate("document.activeElement.id") == "question"


def test_markdown_is_shown_and_never_becomes_html(chat: Page, server: Frontend) -> None:
    server.engine.script = say(MARKDOWN, chunk=7)
    ask(chat, "hi")
    answered(chat)
    assert chat.evaluate("document.querySelectorAll('.assistant img, .assistant script').length") == 0
    assert chat.text(".markdown h3") == "Title"
    assert (chat.text(".markdown strong"), chat.text(".markdown em")) == ("bold", "slanted")
    assert "<img src=x onerror=alert(1)>" in chat.text(".markdown p")
    assert chat.evaluate("[...document.querySelectorAll('.markdown a')].map((a) => a.href)") == [
        "https://example.org/a"
    ]
    assert texts(chat, ".markdown ol > li > ul > li") == ["inner"]
    assert texts(chat, ".markdown td") == ["1", "2"]
    assert texts(chat, ".markdown pre") == ['print("<script>")']


def test_growing_markdown_ends_as_if_it_had_come_at_once(chat: Page) -> None:
    same = """import('/pages/markdown.js').then(({ MarkdownView }) => {
        const text = %s;
        const grown = new MarkdownView();
        for (let end = 1; end <= text.length; end += 1) grown.update(text.slice(0, end));
        const whole = new MarkdownView();
        whole.update(text);
        return grown.root.isEqualNode(whole.root);
    })"""
    assert chat.evaluate(same % json.dumps(MARKDOWN)) is True


@pytest.mark.parametrize("piece", ["*", "**a ", "[", "[a](", "`", "> ", "- ", "_a ", "|a|\\n|-|\\n", "~~", "http://"])
def test_markdown_of_any_kind_takes_linear_time(chat: Page, piece: str) -> None:
    # Quadratic work takes minutes here, and the browser does not answer in time.
    rendered = chat.evaluate(
        f"import('/pages/markdown.js').then(({{ MarkdownView }}) => {{ const view = new MarkdownView();"
        f' view.update("{piece}".repeat(60000)); return view.root.textContent.length; }})'
    )
    assert rendered >= 0


def test_stop_ends_the_request_and_keeps_what_has_come(chat: Page, server: Frontend) -> None:
    server.engine.script = trickle("so far")
    ask(chat, "hi")
    chat.wait("document.querySelector('.assistant .markdown')?.textContent === 'so far'")
    chat.press("Escape")
    answered(chat)
    server.engine.wait_for(Abort)
    assert texts(chat, ".assistant .fact")[0] == "stopped"
    assert chat.text(".assistant .markdown") == "so far"


def test_a_long_prompt_shows_how_far_it_is_and_how_much_longer_it_takes(chat: Page, server: Frontend) -> None:
    server.engine.script = compute((21034, 6016, 8192))
    ask(chat, "hi")
    chat.wait(
        "document.querySelector('#progress').textContent === 'prompt: 8,192 of 21,034 (6,016 cached) · 41 s left'"
    )
    (generate,) = server.engine.wait_for(Generate)
    server.engine.output(generate, list(b"Hello"), finish_reason=FinishReason.STOP, num_output_tokens=5)
    answered(chat)
    assert chat.evaluate("document.querySelector('#progress').hidden")


def test_regenerate_asks_the_same_again(chat: Page, server: Frontend) -> None:
    ask(chat, "hi")
    answered(chat)
    server.engine.script = say("Another")
    chat.click(".assistant footer button:last-child")
    chat.wait("document.querySelector('.assistant .markdown')?.textContent === 'Another'")
    answered(chat)
    first, second = prompts(server)
    assert first.token_ids == second.token_ids


def test_an_edited_message_drops_what_followed(chat: Page, server: Frontend) -> None:
    for number, text in enumerate(("one", "two"), 1):
        ask(chat, text)
        answered(chat, number)
    chat.click(".user footer button:last-child")
    assert chat.evaluate("document.activeElement.tagName") == "TEXTAREA"
    chat.evaluate("document.activeElement.select()")
    chat.type("changed")
    chat.press("Enter")
    chat.wait("document.querySelector('.user .body').textContent === 'changed'")
    answered(chat)
    assert texts(chat, ".user .body") == ["changed"]
    assert b"two" not in bytes(prompts(server)[-1].token_ids[::4])


def test_system_prompt_and_sampling_reach_the_engine(chat: Page, server: Frontend) -> None:
    chat.click("#settings-open")
    chat.evaluate(
        "(() => { const f = document.querySelector('#settings-form').elements;"
        "f.system.value = 'Be brief.'; f.temperature.value = '0.5'; f.top_k.value = '7'; f.max_tokens.value = '33';"
        "f.seed.value = '11'; f.stop.value = 'END'; f.system.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    chat.press("Escape")
    ask(chat, "hi")
    answered(chat)
    (generate,) = prompts(server)
    assert b"Be brief." in bytes(generate.token_ids[::4])
    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 7, 33)
    assert sampling.seed == 11


def test_tools_that_are_no_json_are_told_at_once(chat: Page) -> None:
    chat.click("#settings-open")
    for text, problem in (("{", "This is no JSON"), ("{}", "This must be a list"), ("[]", "")):
        chat.evaluate(
            f"(() => {{ const t = document.querySelector('[name=tools]'); t.value = {json.dumps(text)};"
            "t.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        assert chat.text("#tools-problem").startswith(problem)
        assert chat.evaluate("document.querySelector('[name=tools]').ariaInvalid") == str(bool(problem)).lower()


def test_tool_calls_are_blocks_and_their_results_go_on(chat: Page) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"ci'}}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}
    chat.answer(
        "/v1/chat/completions",
        sse(
            delta(role="assistant", content=""),
            delta(reasoning="Where?"),
            delta(tool_calls=[call]),
            delta(tool_calls=[{"index": 0, "function": {"arguments": 'ty": "Oslo"}'}}]),
            delta("tool_calls"),
            {"choices": [], "usage": usage},
        ),
        sse(delta(role="assistant", content="It rains."), delta("stop")),
    )
    ask(chat, "weather?")
    answered(chat)
    assert chat.text(".call h3 code") == "get_weather"
    assert json.loads(chat.text(".call .arguments")) == {"city": "Oslo"}
    assert chat.evaluate("document.querySelector('.reasoning').open") is False
    assert texts(chat, ".reasoning .plain") == ["Where?"]
    chat.click(".call textarea")
    chat.type("rain")
    chat.click(".calls > button")
    answered(chat, 2)
    assert texts(chat, ".assistant .markdown") == ["It rains."]
    assert chat.evaluate("document.querySelectorAll('.call textarea').length") == 0
    name = "Object.keys(localStorage).find((name) => name.startsWith('moeserve.conversation.'))"
    kept = chat.evaluate(f"JSON.parse(localStorage.getItem({name}))")
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert kept["messages"][2]["tool_call_id"] == "call_1"


def test_an_error_is_told_and_tried_again(chat: Page) -> None:
    refusal = json.dumps({"error": {"message": "The server's queue is full", "code": "queue_full"}})
    chat.answer(
        "/v1/chat/completions",
        (400, "application/json", refusal),
        sse(delta(content="half"), {"error": {"message": "The answer broke off"}}),
        sse(delta(content="whole"), delta("stop")),
    )
    ask(chat, "hi")
    for problem in ("The server's queue is full", "The answer broke off"):
        chat.wait(f"document.querySelector('.problem')?.textContent.includes({json.dumps(problem)})")
        chat.click(".assistant .problem button")
    chat.wait("document.querySelector('.assistant .markdown')?.textContent === 'whole'")
    assert chat.evaluate("document.querySelectorAll('.assistant .problem').length") == 0
    # The browser itself tells of a refusal.
    chat.serve_routes()
    chat.problems = [problem for problem in chat.problems if "status of 400" not in problem]


def test_a_question_before_the_models_are_known_waits_for_them(browser: Browser, server: Frontend) -> None:
    server.engine.script = say("Hello")
    page = browser.page()
    refusal = json.dumps({"error": {"message": "not yet"}})
    models = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
    page.answer("/v1/models", (503, "application/json", refusal), (200, "application/json", models))
    page.open(server.url + "/")
    page.wait("document.body.textContent.includes('not yet')")
    ask(page, "hi")
    page.wait("document.querySelector('.assistant .markdown')?.textContent === 'Hello'")
    assert page.text("#model-name") == "tiny"


def test_conversations_are_kept_named_chosen_and_deleted(chat: Page, server: Frontend) -> None:
    ask(chat, "the first question")
    answered(chat)
    chat.click("#new")
    ask(chat, "the second question")
    answered(chat)
    assert texts(chat, "#conversations .title") == ["the second question", "the first question"]
    chat.open(server.url + "/")
    chat.wait("document.querySelector('.user .body')?.textContent === 'the second question'")
    chat.click("#conversations .current .actions button")
    chat.type("renamed")
    chat.press("Enter")
    assert texts(chat, "#conversations .title") == ["renamed", "the first question"]
    chat.click("#conversations .current .actions button:last-child")
    assert texts(chat, ".user .body") == ["the first question"]
    chat.click(".notice button")
    assert texts(chat, ".user .body") == ["the second question"]
    assert chat.text("#title") == "renamed"


def test_a_conversation_is_exported_as_json(chat: Page) -> None:
    ask(chat, "hi")
    answered(chat)
    chat.evaluate(
        "(() => { const make = URL.createObjectURL; URL.createObjectURL = (blob) => { window.exported = blob.text();"
        " return make(blob); }; })()"
    )
    chat.click("#conversations .current .actions button:nth-child(2)")
    exported = json.loads(chat.evaluate("window.exported"))
    assert [message["content"] for message in exported["messages"]] == ["hi", "Hello"]


def test_the_page_is_used_by_keyboard_alone(chat: Page) -> None:
    chat.evaluate("document.querySelector('.skip').focus()")
    stops = []
    while stops[-1:] != ["question"]:
        chat.press("Tab")
        stops.append(chat.evaluate("document.activeElement.id || document.activeElement.textContent"))
        # The field shows its focus by the frame around it.
        shown = "document.activeElement.closest('#composer') ?? document.activeElement"
        style = f"(({{ outlineStyle, boxShadow }}) => [outlineStyle, boxShadow])(getComputedStyle({shown}))"
        assert chat.evaluate(style) != ["none", "none"], stops
        assert len(stops) < 20
    assert stops[0] == "new"
    assert stops[1:6] == ["search", "import", "Dashboard", "key", "Theme: auto"]
    assert "settings-open" in stops
    chat.evaluate("document.querySelector('.skip').focus()")
    chat.press("Enter")
    assert chat.wait("document.activeElement.id") == "question"


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, server: Frontend) -> None:
    server.engine.script = say("A line of " + "averylongword" * 30 + "\n\n```\n" + "x" * 300 + "\n```")
    for path in ("/", "/dashboard"):
        page = browser.page(360, 740, phone=True)
        page.open(server.url + path)
        if path == "/":
            ask(page, "hi" * 100)
            answered(page)
            assert page.evaluate("getComputedStyle(document.querySelector('.side')).visibility") == "hidden"
            page.click("#list-open")
            page.wait("document.activeElement.id === 'new'")
            page.press("Escape")
            assert page.evaluate("document.activeElement.id") == "list-open"
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_system_decides_about_the_dark_until_a_theme_is_chosen(browser: Browser, server: Frontend) -> None:
    page = browser.page(dark=True)
    page.open(server.url + "/")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("[data-action=theme]")
    assert page.text("[data-action=theme]") == "Theme: light"
    assert page.evaluate(ground) != dark
    page.open(server.url + "/dashboard")
    assert page.evaluate(ground) != dark


def test_behind_a_key_the_page_asks_for_it_once_and_keeps_it(browser: Browser, locked: Frontend) -> None:
    page = browser.page()
    page.open(locked.url + "/")
    for key, reason in (("wrong", ""), ("bob", "The server refuses this key.")):
        page.wait(f"document.querySelector('#api-key-about')?.textContent.startsWith({json.dumps(reason)})")
        page.evaluate("document.querySelector('#api-key').select()")
        page.type(key)
        page.press("Enter")
    page.wait("document.querySelector('#model-name').textContent === 'tiny'")
    page.open(locked.url + "/")
    page.wait("document.querySelector('#model-name').textContent === 'tiny'")
    assert page.evaluate("document.querySelector('dialog[open]')") is None


def test_the_dashboard_says_that_a_key_lacks_the_role_and_takes_another(browser: Browser, locked: Frontend) -> None:
    page = browser.page()
    page.open(locked.url + "/dashboard")
    page.wait("!!document.querySelector('#api-key')")
    page.type("bob")
    page.press("Enter")
    page.wait("document.querySelector('#refusal-text').textContent.includes('role `metrics`')")
    page.click("#refusal-key button")
    page.wait("!!document.querySelector('#api-key')")
    page.evaluate("document.querySelector('#api-key').select()")
    page.type("prom")
    page.press("Enter")
    page.wait("document.querySelector('#state').textContent === 'live'")
    page.wait("document.querySelector('#experts .absent').textContent.includes('role `admin`')")


def stats(**fields: Any) -> Stats:
    nothing = {name: 0 for name in Stats.__struct_fields__ if name not in ("queue_seconds", "features")}
    return Stats(**{**nothing, "rejections": {}, "step_seconds": 0.0, "load": None, **fields})


TIERS = {
    "moeserve_kv_tier_blocks": [["device", 50], ["disk", 40], ["host", 20]],
    "moeserve_kv_tier_bytes": [["device", 3e6], ["disk", 4e6], ["host", 2e6]],
    "moeserve_kv_tier_age_seconds": [["device", 0.5], ["disk", 7200.0], ["host", 41.3]],
    "moeserve_kv_tier_hit_tokens": [["device", 30], ["host", 10], ["disk", 10]],
}


def test_the_dashboard_shows_the_figures_as_they_come(browser: Browser, server: Frontend) -> None:
    page = browser.page()
    page.open(server.url + "/dashboard")
    page.wait("document.querySelector('#state').textContent === 'live'")
    for running in (3, 5):
        while page.text("#requests .big") != str(running):
            blocks = {"blocks_free": 10, "blocks_cached": 20, "blocks_leased": 30}
            figures = stats(num_running=running, num_waiting=2, **blocks, features=TIERS)
            server.engine.send(figures)
            page.wait("true")
    assert page.text("#requests .small") == "2 waiting"
    assert texts(page, "#kv li strong") == ["30 (480 tokens)", "20 (320 tokens)", "10 (160 tokens)"]
    assert page.text("#kv-used") == "50 %"
    assert page.text("#kv-below") == (
        "in host memory 320 tokens (2 MB) · unused for 41 s at most · 20 % of the cached tokens found, "
        "on disk 640 tokens (4 MB) · unused for 2 h at most · 20 % of the cached tokens found"
    )
    assert "running 5" in page.evaluate("document.querySelector('#requests svg').getAttribute('aria-label')")
    page.wait("document.querySelector('#experts .absent').textContent.includes('no experts')")


LONG_PROMPT = {
    "moeserve_prompts_under_way": [[1]],
    "moeserve_prompts_under_way_tokens": [["total", 21034], ["cached", 6016], ["left", 12842]],
    "moeserve_prompts_seconds_left": [[41.26]],
    "moeserve_prompt_seconds_saved": [[1560.0]],
    "moeserve_latest_prompt_tokens": [["total", 21034], ["cached", 20812]],
    "moeserve_latest_prompt_seconds": [[0.9]],
}


def test_the_dashboard_says_how_the_service_is_and_how_far_prompts_are(browser: Browser, tmp_path: Path) -> None:
    with frontend(tmp_path) as server:
        # What the engine had saved before a frontend's first figures does not count.
        server.engine.send(stats())
        page = browser.page()
        page.open(server.url + "/dashboard")
        page.wait("document.querySelector('#state').textContent === 'live'")
        while not page.text("#computing span"):
            server.engine.send(stats(rejections={"queue_full": 3}, features=LONG_PROMPT))
            page.wait("true")
        assert page.text("#computing span") == "8,192 of 21,034 (6,016 cached) · 41 s left"
        assert page.text("#latest-prompt") == (
            "Latest prompt: 20,812 of 21,034 cached, 900 ms · the cache has saved 26 min today"
        )
        state = page.text("#service")
        assert state.startswith("up ")
        assert "0 restarts" in state
        assert "GB of memory (weights" in state
        assert "3 refused" in state
        page.click("#settings summary")
        assert "log-level" in page.text("#settings dl")


def test_the_dashboard_shows_an_hour_with_an_axis(browser: Browser, server: Frontend) -> None:
    page = browser.page()
    while not (figures := server.http.get("/v1/stats").json())["samples"]:
        server.engine.send(stats())
        page.wait("true")
    sample = {**figures, "object": "stats"}
    (now,) = sample["samples"][-1:]
    hour = [{**now, "time": now["time"] - 12 * ago, "running": ago} for ago in range(200, 0, -1)]
    event = f"event: stats\ndata: {json.dumps({**sample, 'hour': hour})}\n\n"
    page.answer("/v1/stats/stream", (200, "text/event-stream", event))
    page.open(server.url + "/dashboard")
    minutes = "[...document.querySelectorAll('#requests .axis span')].map((e) => e.textContent)"
    page.wait(f"{minutes}.length === 3")
    before = page.evaluate(minutes)
    page.click("[name=span][value=hour]")
    assert page.evaluate(minutes)[0] != before[0]
    assert page.evaluate(minutes)[2] == before[2]
    assert "at most 200 in the latest 3600 seconds" in page.evaluate(
        "document.querySelector('#requests svg').getAttribute('aria-label')"
    )


EXPERTS = {
    "layers": [0, 1],
    "num_experts": 4,
    "top_k": 2,
    "num_ranks": 2,
    "load": [[1, 2, 3, 4], [4, 0, 0, 0]],
    "balancedness": {"experts": [0.6, 0.25], "ranks": [0.9, 0.5]},
    "placement": {"version": 3, "ranks": [[[0], [0], [1], [1]], [[0, 1], [0], [1], [1]]]},
    "residency": {
        "resident": [[[0], [0]], [[2, 3], [0]]],
        "stall_seconds": [1.0, 2.0],
        "hits": [10, 10],
        "late": [0, 2],
        "misses": [5, 5],
    },
    "tied": False,
    "strategy": {
        "prefetch": {"source": "auto", "is_on": False, "saved": [{"rows": 1, "free_core": True, "share": -0.25}]}
    },
    "rebalancing": {
        "num_migrations": 2,
        "num_failures": 0,
        "num_experts_loaded": 5,
        "seconds_since_success": 42.0,
        "layer_in_progress": None,
    },
}
BELOW = {"id": "0.2", "parent": "0.1", "preview": "below", "prefix_tokens": 64, "hits": 1, "tokens_saved": 64}
FIRST = {"id": "0.1", "parent": None, "preview": "You are", "prefix_tokens": 32, "hits": 4, "tokens_saved": 128}
PREFIXES = {"num_prefixes": 2, "prefixes": [{**BELOW, "own": False}, {**FIRST, "own": True, "pinned": True}]}


def test_the_dashboard_shows_keys_and_requests_and_cancels_one(browser: Browser, server: Frontend) -> None:
    request = {"id": "chatcmpl-1", "key": "alice", "route": "/v1/chat/completions", "choices": 2, "running": True}
    request |= {
        "prompt_tokens": 21034,
        "computed_tokens": 8192,
        "cached_tokens": 6016,
        "completion_tokens": 0,
        "age_s": 7,
    }
    used = {"requests": 3, "prompt_tokens": 100, "cached_tokens": 71, "completion_tokens": 20, "total_tokens": 120}
    limit = {"limit": 5000, "per": "day", "used": 120, "left": 4880, "resets_at": 0}
    alice = {"key": "alice", "valid": True, "running": 1, "waiting": 2, "today": used, "limits": {"tokens": limit}}
    page = browser.page()
    page.answer("/v1/requests/chatcmpl-1/cancel", (404, "application/json", '{"error": {"message": "It has ended."}}'))
    page.answer("/v1/requests", (200, "application/json", json.dumps({"data": [request]})))
    page.answer("/v1/usage", (200, "application/json", json.dumps({"data": [alice]})))
    page.answer("/v1/experts", (200, "application/json", json.dumps(EXPERTS)))
    page.answer("/v1/cache", (200, "application/json", json.dumps(PREFIXES)))
    page.open(server.url + "/dashboard")
    page.wait("!!(document.querySelector('#keys td') && document.querySelector('#open td'))")
    shown = texts(page, "#open td")
    assert shown[1:6] == ["alice", "/v1/chat/completions", " 8,192 of 21,034, 6,016 cached", "0", "7 s"]
    assert texts(page, "#keys td") == ["alice", "1", "2", "3", "120", "71 %", " 4,880 of 5,000"]
    page.click("#open button")
    page.wait("document.querySelector('.notice')?.textContent.startsWith('It has ended.')")
    page.wait_for_a_problem()
    assert [problem.rpartition("/v1")[2] for problem in page.problems] == ["/requests/chatcmpl-1/cancel"]


def test_the_dashboard_shows_experts_and_prefixes(browser: Browser, server: Frontend) -> None:
    page = browser.page()
    page.answer("/v1/experts", (200, "application/json", json.dumps(EXPERTS)))
    page.answer("/v1/cache", (200, "application/json", json.dumps(PREFIXES)))
    page.open(server.url + "/dashboard")
    page.wait("!document.querySelector('#experts .content').hidden")
    assert not page.evaluate("document.querySelector('#experts details').open")
    page.click("#experts summary")
    facts = dict(zip(texts(page, "#expert-facts dt"), texts(page, "#expert-facts dd"), strict=True))
    assert facts["layers placed anew"] == "2"
    assert facts["in memory"] == "5 of 8"
    assert "balance, worst layer" not in facts  # a curve has it
    assert facts["loads ahead"] == "auto, off now; would cost 25 % of a step with 1 token"
    assert page.text("#expert-curves .big") == "0.50"
    assert page.evaluate("document.querySelector('#tied').hidden")
    page.evaluate("document.querySelector('#heat').focus()")
    readings = []
    for key in ("ArrowRight", "ArrowDown"):
        page.press(key)
        readings.append(page.text("#heat-reading"))
    assert readings[0] == "layer 0, expert 1, rank 0: 0.80 of the mean load, not in memory"
    page.evaluate(
        "(() => { const s = document.querySelector('#heat-grouping'); s.value = 'rank';"
        " s.dispatchEvent(new Event('change')); document.querySelector('#heat').focus(); })()"
    )
    page.press("ArrowRight")
    assert page.text("#heat-reading") == "layer 0, rank 1: 1.40 of the mean load, 2 experts"
    page.wait("!document.querySelector('#prefixes .content').hidden")
    assert texts(page, ".prefixes .text") == ["You are", "below"]
    assert page.problems == []


def test_prefixes_are_pinned_unpinned_warmed_and_dropped_from_the_dashboard(browser: Browser, server: Frontend) -> None:
    page = browser.page()
    done = (200, "application/json", "{}")
    page.answer("/v1/experts", (200, "application/json", json.dumps(EXPERTS)))
    for path in ("/v1/cache/pin", "/v1/cache/unpin", "/v1/cache/warm"):
        page.answer(path, done)
    page.answer("/v1/cache", (200, "application/json", json.dumps(PREFIXES)))
    page.evaluate("0")
    page.open(server.url + "/dashboard")
    page.wait("!document.querySelector('#prefixes .content').hidden")
    page.evaluate(
        "(() => { window.asked = []; const ask = window.fetch; window.fetch = (path, options) => {"
        " const { method = 'GET', body = '' } = options ?? {};"
        " if (method !== 'GET') window.asked.push([method, path, body]);"
        " return ask(path, options); }; })()"
    )
    assert texts(page, ".prefixes td button") == ["Unpin"]  # the other is another key's
    page.click(".prefixes td button")
    page.click("#warm")
    page.type("You are")
    page.click(".key-dialog .primary")
    page.click("#drop")
    assert page.text("#drop") == "Drop all of mine?"
    page.click("#drop")
    page.wait("window.asked.length === 3")
    assert page.evaluate("window.asked") == [
        ["POST", "/v1/cache/unpin", '{"id":"0.1"}'],
        ["POST", "/v1/cache/warm", '{"prompt":"You are"}'],
        ["DELETE", "/v1/cache", ""],
    ]


@pytest.mark.parametrize("look", ["desktop", "phone", "dark"])
def test_the_dashboard_is_photographed(browser: Browser, server: Frontend, tmp_path: Path, look: str) -> None:
    """The pictures are in the folder that `MOESERVE_TEST_PICTURES` names, else in the test's own."""
    page = browser.page(*((390, 844) if look == "phone" else (1200, 900)), phone=look == "phone", dark=look == "dark")
    page.answer("/v1/experts", (200, "application/json", json.dumps(EXPERTS)))
    page.answer("/v1/cache", (200, "application/json", json.dumps(PREFIXES)))
    page.open(server.url + "/dashboard")
    page.wait("!document.querySelector('#prefixes .content').hidden")
    while page.text("#requests .big") != "2":
        blocks = {"blocks_free": 10, "blocks_cached": 20, "blocks_leased": 30}
        server.engine.send(stats(num_running=2, **blocks, features=LONG_PROMPT | TIERS))
        page.wait("true")
    page.screenshot(Path(os.environ.get("MOESERVE_TEST_PICTURES") or tmp_path) / f"dashboard-{look}.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= (390 if look == "phone" else 1200)


def test_the_dashboard_draws_how_experts_are_waited_for_and_says_where_they_come_in_groups(
    browser: Browser, server: Frontend
) -> None:
    memory = {"resident": [[[0], [0]], [[2, 3], [0]]], "stall_seconds": [1e6, 1e6], "late": [0, 0], "misses": [9, 9]}
    earlier = {**EXPERTS, "residency": {**memory, "stall_seconds": [0, 0], "hits": [0, 0], "misses": [0, 0]}}
    page = browser.page()
    page.answer("/v1/experts", (200, "application/json", json.dumps(earlier)))
    page.answer("/v1/cache", (200, "application/json", json.dumps(PREFIXES)))
    page.open(server.url + "/dashboard")
    page.wait("!document.querySelector('#experts .content').hidden")
    later = {**EXPERTS, "tied": True, "residency": {**memory, "hits": [3, 3]}}
    page.answer("/v1/experts", (200, "application/json", json.dumps(later)))
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait("document.querySelectorAll('#expert-curves .big')[2].textContent === '25 %'")
    assert not page.evaluate("document.querySelector('#tied').hidden")
    assert page.problems == []


def test_no_file_of_the_pages_is_unused(browser: Browser, server: Frontend, tmp_path: Path) -> None:
    used = set()
    for path in ("/", "/dashboard"):
        page = browser.page()
        page.open(server.url + path)
        page.wait("performance.getEntriesByType('resource').some((e) => e.name.includes('/v1/'))")
        used |= set(page.evaluate("performance.getEntriesByType('resource').map((e) => new URL(e.name).pathname)"))
    scripts = {path for path in used if path.endswith((".js", ".css"))}
    from moeserve.frontend.pages import FILES

    assert scripts == {path for path in FILES if path.endswith((".js", ".css"))}
