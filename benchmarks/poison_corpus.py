"""Requests of a given size that are as dear to a server as their author could make them: 4 MB unless told otherwise.

Each is valid JSON or nearly so, and aims at one part of the HTTP process: the JSON reader, the checks of fields, the
template, the tokenizer, grammars, and the writing of answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SIZE = 4_000_000
CHAT, COMPLETIONS, MESSAGES, RESPONSES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_HEAD = {"model": "m", "max_tokens": 4}
_OPENING = "<|im_start|>"


@dataclass(frozen=True, slots=True)
class Poison:
    """One request."""

    name: str
    path: str
    body: bytes


def poisons(size: int = SIZE) -> Iterator[Poison]:
    """Yield the requests, one after another, each with a body of at most `size` bytes, which are 250,000 or more."""
    for group in (_shapes, _prompts, _sampling, _formats, _chats, _tools, _other_dialects, _other_routes):
        for poison in group(size):
            assert len(poison.body) <= size, f"{poison.name} has {len(poison.body)} bytes"
            yield poison


def _body(**fields: Any) -> bytes:
    return json.dumps({**_HEAD, **fields}, separators=(",", ":"), ensure_ascii=False).encode()


def _spliced(value: bytes, **fields: Any) -> bytes:
    """Return a body with `value` in place of the text `HERE` in quotes."""
    return _body(**fields).replace(b'"HERE"', value, 1)


def _filled(unit: str, size: int) -> str:
    """Return `unit` repeated to about `size` bytes of JSON, less room for the other fields."""
    return unit * ((size - 400) // len(unit.encode()))


def _listed(item: str, size: int) -> bytes:
    """Return a JSON array full of one item, itself JSON."""
    return b"[" + b",".join([item.encode()] * ((size - 400) // (len(item.encode()) + 1))) + b"]"


def _numbered(make: Callable[[int], str], size: int, brackets: str = "{}") -> bytes:
    """Return a JSON object or array full of items made from their numbers."""
    items, room, number = [], size - 400, 0
    while (room := room - len(item := make(number).encode()) - 1) > 0:
        items.append(item)
        number += 1
    return brackets[0].encode() + b",".join(items) + brackets[1].encode()


def _nested(opening: bytes, closing: bytes, size: int) -> bytes:
    levels = (size - 400) // (len(opening) + len(closing))
    return opening * levels + b"1" + closing * levels


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _shapes(size: int) -> Iterator[Poison]:
    """JSON that is dear to read, with any meaning of its fields."""
    yield Poison("not JSON", COMPLETIONS, b"x" * size)
    yield Poison("white space", COMPLETIONS, b" " * size)
    yield Poison("arrays in arrays", COMPLETIONS, _nested(b"[", b"]", size))
    yield Poison("arrays in a prompt", COMPLETIONS, _spliced(_nested(b"[", b"]", size), prompt="HERE"))
    yield Poison("arrays in an unknown field", COMPLETIONS, _spliced(_nested(b"[", b"]", size), prompt="x", y="HERE"))
    yield Poison("objects in a message", CHAT, _spliced(_nested(b'{"a":', b"}", size), messages=_user("HERE")))
    yield Poison("zeros in an unknown field", COMPLETIONS, _spliced(_listed("0", size), prompt="x", y="HERE"))
    fields = _numbered(lambda number: f'"field {number}":0', size)
    yield Poison("unknown fields", COMPLETIONS, _body(prompt="x")[:-1] + b"," + fields[1:])
    yield Poison(
        "one field many times", COMPLETIONS, b'{"model":"m",' + b'"prompt":"x",' * ((size - 40) // 13) + b'"n":1}'
    )
    yield Poison("digits of a temperature", COMPLETIONS, _spliced(b"1" * (size - 400), prompt="x", temperature="HERE"))
    yield Poison("digits of a count", COMPLETIONS, _spliced(b"1" * (size - 400), prompt="x", n="HERE"))
    digits = b"1." + b"1" * (size - 400)
    yield Poison("digits behind the point", COMPLETIONS, _spliced(digits, prompt="x", temperature="HERE"))
    yield Poison("a wrong byte at the end", COMPLETIONS, b'{"prompt":"' + b"x" * (size - 20) + b'\xff"}')
    escapes = _spliced(b'"' + b"\\ud83d\\ude00" * ((size - 400) // 12) + b'"', prompt="HERE")
    yield Poison("escaped characters", COMPLETIONS, escapes)
    halves = _spliced(b'"' + b"\\ud83d" * ((size - 400) // 6) + b'"', prompt="HERE")
    yield Poison("halves of characters", COMPLETIONS, halves)


def _prompts(size: int) -> Iterator[Poison]:
    texts = {
        "a word": "a",
        "spaces": " ",
        "line breaks": "\n",
        "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "combining marks": "e\u0301\u0323\u0302",
        "digits": "7",
        "brackets": "<|",
        "special tokens": _OPENING,
        "noncharacters": "\ufdd0\ufdd1",
        "no-break spaces": "\u00a0",
        "words": "the cat sat on a mat and ",
    }
    for name, unit in texts.items():
        whole = _filled(unit.replace("\n", "\\n") if unit == "\n" else unit, size).replace("\\n", "\n")
        yield Poison(f"prompt of {name}", COMPLETIONS, _body(prompt=whole))
        yield Poison(f"shorter prompt of {name}", COMPLETIONS, _body(prompt=whole[: min(len(whole), size // 16)]))
        yield Poison(f"message of {name}", CHAT, _body(messages=_user(whole)))
    yield Poison("ids", COMPLETIONS, _spliced(_listed("5", size), prompt="HERE"))
    yield Poison("ids shown for each choice", COMPLETIONS, _body(prompt=[5] * 8000, echo=True, n=16, logprobs=5))
    yield Poison("wide ids", COMPLETIONS, _spliced(_listed("4294967296", size), prompt="HERE"))
    yield Poison("empty prompts", COMPLETIONS, _spliced(_listed("[]", size), prompt="HERE"))
    yield Poison("short prompts", COMPLETIONS, _spliced(_listed('"a"', size), prompt="HERE"))
    each = max(1, (size - 2000) // 256)
    yield Poison("texts in a batch", COMPLETIONS, _body(prompt=["the cat sat " * (each // 13)] * 256))
    yield Poison("awkward texts in a batch", COMPLETIONS, _body(prompt=["a" * (each - 4)] * 256))
    yield Poison("ids in a batch", COMPLETIONS, _body(prompt=[[5] * (each // 2 - 4)] * 256, echo=True))


def _sampling(size: int) -> Iterator[Poison]:
    yield Poison("one stop string", COMPLETIONS, _body(prompt="x", stop=_filled("a", size)))
    yield Poison("stop strings", COMPLETIONS, _spliced(_listed('"a"', size), prompt="x", stop="HERE"))
    yield Poison("stop tokens", COMPLETIONS, _spliced(_listed("5", size), prompt="x", stop_token_ids="HERE"))
    bias = _numbered(lambda number: f'"{number}":1', size)
    yield Poison("biases", COMPLETIONS, _spliced(bias, prompt="x", logit_bias="HERE"))
    repeated = b'{"5":1' + b',"5":1' * ((size - 400) // 6) + b"}"
    yield Poison("one bias many times", COMPLETIONS, _spliced(repeated, prompt="x", logit_bias="HERE"))
    yield Poison("a name", COMPLETIONS, _body(prompt="x").replace(b'"m"', b'"' + b"m" * (size - 400) + b'"', 1))
    yield Poison("a salt", COMPLETIONS, _body(prompt="x", cache_salt=_filled("a", size)))
    yield Poison("a cache key", COMPLETIONS, _body(prompt="x", prompt_cache_key=_filled("a", size)))
    options = _numbered(lambda number: f'"option {number}":1', size)
    yield Poison("cache options", COMPLETIONS, _spliced(options, prompt="x", prompt_cache_options="HERE"))


def _formats(size: int) -> Iterator[Poison]:
    allowed = min(size, 120_000)
    properties = _numbered(lambda number: f'"property {number}":{{"type":"string"}}', size)
    whole = b'{"type":"object","properties":' + properties + b"}"
    some = b'{"type":"object","properties":' + _numbered(lambda n: f'"p{n}":{{"type":"string"}}', allowed - 400) + b"}"
    chosen = _numbered(lambda number: f'"choice {number}"', size, "[]")
    for name, schema in {
        "a schema of properties": whole,
        "a schema of some properties": some,
        "schemas in schemas": _nested(b'{"items":', b"}", size),
        "a schema of choices": b'{"enum":' + chosen + b"}",
        "a schema of alternatives": b'{"anyOf":' + _listed('{"type":"string","maxLength":9}', size) + b"}",
        "a schema of some alternatives": b'{"anyOf":' + _listed('{"type":"string","maxLength":9}', allowed) + b"}",
        "a schema with a long pattern": b'{"type":"string","pattern":"' + b"(a|b)*" * ((size - 500) // 6) + b'"}',
        "a schema with a large bound": b'{"type":"string","minLength":100000000}',
        "a schema with many items": b'{"type":"array","items":{"type":"integer"},"minItems":1000000}',
    }.items():
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": "HERE"}}
        yield Poison(name, CHAT, _spliced(schema, messages=_user("x"), response_format=form))
        yield Poison(f"{name}, guided", COMPLETIONS, _spliced(schema, prompt="x", guided_json="HERE"))
    yield Poison(
        "a schema as text", COMPLETIONS, _body(prompt="x", guided_json='{"enum":[' + "1," * (size // 2 - 300) + "1]}")
    )
    yield Poison("a pattern", COMPLETIONS, _body(prompt="x", guided_regex=_filled("(a|b)*", size)))
    yield Poison("a shorter pattern", COMPLETIONS, _body(prompt="x", guided_regex=_filled("(a|b)*", allowed)))
    yield Poison("repetitions", COMPLETIONS, _body(prompt="x", guided_regex="((a{1,1000}){1,1000}){1,1000}"))
    yield Poison("repetitions of classes", COMPLETIONS, _body(prompt="x", guided_regex=r"(\w{1,500}\s){1,500}" * 20))
    yield Poison("choices", COMPLETIONS, _spliced(chosen, prompt="x", guided_choice="HERE"))
    some_chosen = _numbered(lambda number: f'"choice {number}"', allowed, "[]")
    yield Poison("some choices", COMPLETIONS, _spliced(some_chosen, prompt="x", guided_choice="HERE"))
    yield Poison(
        "a grammar", COMPLETIONS, _body(prompt="x", guided_grammar="start: A\nA: " + _filled("/a/|", size) + "/b/")
    )
    rules = "".join(f'r{number}: "a" r{number + 1} | "b"\n' for number in range(allowed // 30))
    yield Poison("rules of a grammar", COMPLETIONS, _body(prompt="x", guided_grammar="start: r0\n" + rules))
    bnf = "root ::= r0\n" + "".join(f'r{number} ::= "a" r{number + 1} | "b"\n' for number in range(allowed // 30))
    yield Poison("a grammar in BNF", COMPLETIONS, _body(prompt="x", guided_grammar=bnf))
    parentheses = "root ::= " + "(" * (allowed // 2 - 300) + '"a"' + ")" * (allowed // 2 - 300)
    yield Poison("parentheses in BNF", COMPLETIONS, _body(prompt="x", guided_grammar=parentheses))


def _chats(size: int) -> Iterator[Poison]:
    each = max(1, size // 4096 - 40)
    yield Poison("messages", CHAT, _body(messages=_user("a" * each) * 4096))
    short = '{"role":"user","content":"a"}'
    yield Poison("more messages", CHAT, _spliced(_listed(short, size), messages="HERE"))
    yield Poison("parts", CHAT, _spliced(_listed('{"type":"text","text":"a"}', size), messages=_user("HERE")))
    some_parts = [{"type": "text", "text": "a" * max(1, size // 4096 - 40)}] * 4096
    yield Poison("fewer parts", CHAT, _body(messages=_user(some_parts)))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + _filled("iVBORw0K", size - 400)}}
    yield Poison("an image", CHAT, _body(messages=_user([image])))
    small = '{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBORw0K"}}'
    yield Poison("images", CHAT, _spliced(_listed(small, size), messages=_user("HERE")))
    yield Poison("a role", CHAT, _body(messages=[{"role": _filled("a", size), "content": "x"}]))
    yield Poison(
        "a continued answer",
        CHAT,
        _body(
            messages=[*_user("x"), {"role": "assistant", "content": _filled("a", size)}], continue_final_message=True
        ),
    )
    marked = [{"type": "text", "text": "a" * (size // 16), "prompt_cache_breakpoint": {"mode": "explicit"}}]
    yield Poison("marks of the cache", CHAT, _body(messages=_user(marked) * 8))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call] * 200}]
    each_turn = len(json.dumps(calls, separators=(",", ":")))
    yield Poison("calls", CHAT, _body(messages=[*_user("x"), *calls * ((size - 1000) // each_turn)]))
    wide = {"name": "f", "arguments": '{"a":[' + "1," * (size // 2 - 600) + "1]}"}
    yield Poison(
        "arguments",
        CHAT,
        _body(
            messages=[
                *_user("x"),
                {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": wide}]},
            ]
        ),
    )
    variables = {f"variable_{number}": "a" * (size // 64 - 40) for number in range(64)}
    yield Poison("template variables", CHAT, _body(messages=_user("x"), chat_template_kwargs=variables))
    more = _numbered(lambda number: f'"variable_{number}":1', size)
    yield Poison("more template variables", CHAT, _spliced(more, messages=_user("x"), chat_template_kwargs="HERE"))
    lists = {"variable": "HERE"}
    deep = _listed("[[0]]", size)
    yield Poison("a wide template variable", CHAT, _spliced(deep, messages=_user("x"), chat_template_kwargs=lists))


def _tools(size: int) -> Iterator[Poison]:
    def tool(name: str, parameters: Any, description: str = "") -> dict[str, Any]:
        function = {"name": name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    room = size - 2000
    wide = {f"property {number}": {"type": "string"} for number in range(room // 1024 // 50)}
    many = [tool(f"tool_{number}", {"type": "object", "properties": wide}) for number in range(1024)]
    while len(_body(messages=_user("x"), tools=many)) > room:
        many.pop()
    for choice in ("auto", "required"):
        yield Poison(f"tools, {choice}", CHAT, _body(messages=_user("x"), tools=many, tool_choice=choice))
    some = [tool(f"tool_{number}", {"enum": list(range(35_000))}) for number in range(16)]
    while len(_body(messages=_user("x"), tools=some)) > room:
        some.pop()
    yield Poison("tools with large schemas", CHAT, _body(messages=_user("x"), tools=some))
    yield Poison("large schemas, required", CHAT, _body(messages=_user("x"), tools=some, tool_choice="required"))
    less = _numbered(lambda number: f'{{"type":"function","function":{{"name":"t{number}"}}}}', size, "[]")
    yield Poison("more tools", CHAT, _spliced(less, messages=_user("x"), tools="HERE"))
    yield Poison("a description", CHAT, _body(messages=_user("x"), tools=[tool("t", {}, _filled("a", size))]))
    described = [tool(f"tool_{number}", {}, "a" * min(120_000, size)) for number in range(room // 121_000)]
    yield Poison("descriptions", CHAT, _body(messages=_user("x"), tools=described))
    deep = _nested(b'{"items":', b"}", min(size, 200_000))
    yield Poison("a deep schema", CHAT, _spliced(deep, messages=_user("x"), tools=[tool("t", "HERE")]))
    less_deep = _nested(b'{"items":', b"}", 1400)
    yield Poison("a less deep schema", CHAT, _spliced(less_deep, messages=_user("x"), tools=[tool("t", "HERE")]))


def _other_dialects(size: int) -> Iterator[Poison]:
    word = _filled("a", size)
    yield Poison("message: a word", MESSAGES, _body(messages=_user(word)))
    yield Poison("message: special tokens", MESSAGES, _body(messages=_user(_filled(_OPENING, size))))
    yield Poison("message: a system text", MESSAGES, _body(messages=_user("x"), system=word))
    blocks = _listed('{"type":"text","text":"a"}', size)
    yield Poison("message: blocks", MESSAGES, _spliced(blocks, messages=_user("HERE")))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": word[:-400]}}
    yield Poison("message: an image", MESSAGES, _body(messages=_user([image])))
    results = _listed('{"type":"tool_result","tool_use_id":"a","content":"b"}', size)
    yield Poison("message: results", MESSAGES, _spliced(results, messages=_user("HERE")))
    tools = _numbered(lambda number: f'{{"name":"t{number}","input_schema":{{}}}}', size, "[]")
    yield Poison("message: tools", MESSAGES, _spliced(tools, messages=_user("x"), tools="HERE"))
    yield Poison("count: a word", f"{MESSAGES}/count_tokens", _body(messages=_user(word)))
    yield Poison("count: special tokens", f"{MESSAGES}/count_tokens", _body(messages=_user(_filled(_OPENING, size))))
    yield Poison("count: blocks", f"{MESSAGES}/count_tokens", _spliced(blocks, messages=_user("HERE")))
    head = {"model": "m", "max_output_tokens": 4}
    for store in (False, True):
        name = "response" if store else "unstored response"

        def response(value: bytes, store: bool = store, **fields: Any) -> bytes:
            text = json.dumps({**head, "store": store, **fields}, separators=(",", ":")).encode()
            return text.replace(b'"HERE"', value, 1)

        yield Poison(f"{name}: a word", RESPONSES, response(json.dumps(word).encode(), input="HERE"))
        short = json.dumps(_filled("the cat sat ", min(size, 60_000))).encode()
        yield Poison(f"{name}: a short text", RESPONSES, response(short, input="HERE"))
        special = json.dumps(_filled(_OPENING, size)).encode()
        yield Poison(f"{name}: special tokens", RESPONSES, response(special, input="HERE"))
        items = _listed('{"role":"user","content":"a"}', size)
        yield Poison(f"{name}: items", RESPONSES, response(items, input="HERE"))
        fewer = _listed('{"role":"user","content":"' + "a" * max(1, size // 4096 - 60) + '"}', size)
        yield Poison(f"{name}: fewer items", RESPONSES, response(fewer, input="HERE"))
        yield Poison(f"{name}: nested items", RESPONSES, response(_nested(b'[{"a":', b"}]", size), input="HERE"))
        tools = _numbered(lambda number: f'{{"type":"function","name":"t{number}","parameters":{{}}}}', size, "[]")
        yield Poison(f"{name}: tools", RESPONSES, response(tools, input="x", tools="HERE"))
        schema = b'{"enum":' + _numbered(lambda number: f'"choice {number}"', size, "[]") + b"}"
        form = {"format": {"type": "json_schema", "name": "a", "schema": "HERE"}}
        yield Poison(f"{name}: a schema", RESPONSES, response(schema, input="x", text=form))
        yield Poison(
            f"{name}: an earlier one",
            RESPONSES,
            response(json.dumps(word).encode(), input="x", previous_response_id="HERE"),
        )


def _other_routes(size: int) -> Iterator[Poison]:
    some = min(size, 990_000)
    for name, unit in {
        "words": "the cat sat ",
        "a word": "a",
        "special tokens": _OPENING,
        "emoji": "\U0001f469",
    }.items():
        yield Poison(f"tokenize: {name}", "/tokenize", _body(prompt=_filled(unit, some)))
        yield Poison(f"tokenize: too many {name}", "/tokenize", _body(prompt=_filled(unit, size)))
        yield Poison(f"tokenize: {name} in a message", "/tokenize", _body(messages=_user(_filled(unit, size))))
    yield Poison("tokenize: a list", "/tokenize", _spliced(_listed("[0]", size), prompt="x", y="HERE"))
    yield Poison("detokenize: ids", "/detokenize", _body(tokens=[5] * min(size // 2 - 400, 262_144)))
    yield Poison("detokenize: too many ids", "/detokenize", _spliced(_listed("5", size), tokens="HERE"))
    yield Poison("warm: a word", "/v1/cache/warm", b'{"model":"m","prompt":"' + b"a" * (size - 100) + b'"}')
    yield Poison("warm: ids", "/v1/cache/warm", b'{"model":"m","prompt":' + _listed("5", size) + b"}")
    yield Poison("pin: a word", "/v1/cache/pin", b'{"model":"m","prompt":"' + b"a" * (size - 100) + b'"}')
    yield Poison("pin: ids", "/v1/cache/pin", b'{"model":"m","prompt":' + _listed("5", size) + b"}")
    pinned = b'{"model":"m","messages":[{"role":"user","content":"' + b"the cat sat " * ((size - 200) // 12) + b'"}]}'
    yield Poison("pin: a message", "/v1/cache/pin", pinned)
    yield Poison("unpin: an id", "/v1/cache/unpin", b'{"id":"' + b"a" * (size - 100) + b'"}')
    yield Poison(
        "trace: unknown fields", "/v1/experts/trace", b'{"action":"start",' + b'"a":0,' * ((size - 40) // 6) + b'"b":0}'
    )
