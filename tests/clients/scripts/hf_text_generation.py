"""huggingface_hub's `text_generation`, by TGI's API."""

import json

from client_checks import FORECAST_SCHEMA, KEY, QUESTION, URL, Checks, check_forecast, raised
from huggingface_hub import InferenceClient
from huggingface_hub.errors import TextGenerationError, ValidationError

client = InferenceClient(f"{URL}/generate", token=KEY, timeout=120)
check = Checks("tgi")
BEGINNING = "Once upon a time there was a small library by the sea, and the woman who kept it knew every book. " * 3


@check
def plain():
    first = client.text_generation(BEGINNING, max_new_tokens=16)
    assert first
    answer = client.text_generation(f"{BEGINNING}{first} One day", max_new_tokens=16, details=True)
    assert answer.generated_text
    assert 0 < answer.details.generated_tokens <= 16
    assert answer.details.finish_reason in ("length", "stop", "eos_token")


@check
def streaming():
    options = {"max_new_tokens": 16, "do_sample": False}
    pieces = list(client.text_generation(BEGINNING, stream=True, details=True, **options))
    text = "".join(piece.token.text for piece in pieces if not piece.token.special)
    assert text == client.text_generation(BEGINNING, **options)
    assert len(pieces) > 5, "few pieces"
    assert pieces[-1].details.generated_tokens <= 16


for name in ("tool", "parallel", "streamed_tool", "required"):
    check.cannot(name, "a text has no tools")


@check
def structured():
    grammar = {"type": "json", "value": FORECAST_SCHEMA}
    check_forecast(json.loads(client.text_generation(QUESTION, grammar=grammar, max_new_tokens=200)))


@check
def error():
    refused = raised(lambda: client.text_generation("Hello", top_p=7.0), ValidationError)
    assert "top_p" in str(refused), refused
    raised(lambda: InferenceClient(f"{URL}/generate", token="wrong").text_generation("Hello"), TextGenerationError)
