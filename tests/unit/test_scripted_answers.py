"""The decisions that the tests of clients make for the demo."""

import json

from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, OutputFormat, Tool, ToolChoice
from moeserve.plan import SamplingParams
from tests.clients.scripted.scripted_answers import scripted_form

TOOLS = (Tool("get_weather"), Tool("get_time"))
BOTH = 'Use get_weather({"city": "Rome"}) and get_time({"zone": "UTC"}).'
RESULT = {"role": "tool", "tool_call_id": "1", "content": "22 degrees"}


def decided(*messages, tools=TOOLS, **options):
    sampling = SamplingParams(max_tokens=1)
    prompt = ChatPrompt(list(messages), tools=tools)
    request = GenerateRequest(
        model="m", prompts=[prompt], sampling=sampling, max_tokens=None, seed=None, tools=tools, **options
    )
    form = scripted_form(request)
    if form is None or form.kind != "grammar":
        return form
    return json.loads(form.value.removeprefix("start: "))


def user(text):
    return {"role": "user", "content": text}


def calls(*named):
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in named)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def test_calls_that_a_user_spells_are_made_at_once():
    assert decided(user(BOTH)) == calls(("get_weather", {"city": "Rome"}), ("get_time", {"zone": "UTC"}))


def test_calls_are_made_one_by_one_where_they_must_not_be_parallel():
    first, second = ("get_weather", {"city": "Rome"}), ("get_time", {"zone": "UTC"})
    assert decided(user(BOTH), parallel_tool_calls=False) == calls(first)
    assert decided(user(BOTH), RESULT, parallel_tool_calls=False) == calls(second)


def test_results_are_repeated():
    assert decided(user(BOTH), RESULT, RESULT) == "The tools said: 22 degrees; 22 degrees"


def test_an_answer_that_has_a_form_is_the_models_own():
    form = OutputFormat("json_object")
    assert decided(user(BOTH), RESULT, RESULT, output_format=form) == form


def test_an_agent_that_must_call_gets_its_final_answer():
    final = Tool("final_answer", parameters={"properties": {"answer": {"type": "string"}}})
    options = {"tools": (*TOOLS, final), "tool_choice": ToolChoice("required")}
    said = calls(("final_answer", {"answer": "The tools said: 22 degrees; 22 degrees"}))
    assert decided(user(BOTH), RESULT, RESULT, **options) == said


def test_results_that_a_user_says_together_are_those_of_all_calls():
    assert decided(user(BOTH), user("Observation:\n22 degrees")) == "The tools said: Observation:\n22 degrees"


def test_the_model_decides_where_nothing_is_spelled_or_no_tool_may_be_called():
    assert decided(user("What is the weather?")) is None
    assert decided(user('Use other({"city": "Rome"}).')) is None
    assert decided(user(BOTH), tool_choice=ToolChoice("none")) is None
