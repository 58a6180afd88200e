"""The mistakes that people make, in commands, settings, files and requests: each gets a code and the right sentence."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import pytest

from tests.support.fake_engine import say
from tests.support.forking import popen
from tests.support.frontend import Frontend, frontend
from tests.support.service import ROOT
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import write_model_dir

# What is typed behind `moeserve`, the exit code, and what the sentence says. $folder holds the files of `folder` below.
COMMANDS = [
    # Addresses
    ("serve --port $taken", 1, "Port $taken on 127.0.0.1 is taken by another process"),
    ("serve --port 99999", 2, "--port: 99999 is more than 65535"),
    ("serve --port 80x", 2, "--port: '80x' is not a whole number"),
    ("serve --host 203.0.113.7", 1, "This machine has no address 203.0.113.7: choose one of its own with --host."),
    ("serve --host nowhere.invalid", 1, "The host name 'nowhere.invalid' cannot be resolved"),
    ("chat --url 127.0.0.1:1", 1, "start one with `moeserve serve`"),
    ("top --url 127.0.0.1:1", 1, "start one with `moeserve serve`"),
    ("doctor --url 127.0.0.1:1", 1, "start one with `moeserve serve`"),
    ("stop 4711", 1, "No service runs; `moeserve ps` lists them."),
    # Files of settings
    ("serve --config $folder/typo.toml", 2, "unknown setting 'prot'; did you mean port?"),
    ("serve --config $folder/broken.toml", 2, "is not valid TOML: Invalid value (at line 2, column 8)"),
    ("serve --config $folder/table.toml", 2, "unknown setting 'http'; it is a table, and settings stand without one"),
    ("serve --config $folder/none.toml", 2, "cannot read $folder/none.toml: No such file or directory"),
    ("MOESERVE_PROT=1 serve", 2, "MOESERVE_PROT in the environment is no setting; did you mean MOESERVE_PORT?"),
    (
        "MOESERVE_API_KEYS=k serve",
        2,
        "MOESERVE_API_KEYS in the environment is no setting; did you mean MOESERVE_API_KEY",
    ),
    ("serve --api-key-file $folder/none", 2, "cannot read the key file $folder/none"),
    ("serve --api-key-file $folder/empty", 2, "the key file $folder/empty holds no key"),
    ("serve --api-key-file $folder/limits", 2, "line 1 of the key file: `tokens=` takes a number per day"),
    ("serve --public-prefixes $folder/none", 2, "$folder/none"),
    # Settings
    ("serve --slo 2s", 2, "--slo: '2s' is not like ttft:500ms, tpot:500ms"),
    ("serve --quantization Q4_K_M", 2, "name it behind the model, as owner/name:Q4_K_M"),
    (
        "serve --sleep-after 5 $folder/none",
        1,
        "--sleep-after 5 is in seconds: the model is loaded anew after each pause",
    ),
    ("serve --threads 4096 $folder/none", 1, "--threads 4096 is more than the"),
    ("serve --placement balanced", 2, "--placement balanced needs --expert-parallel-size of at least 2"),
    ("serve --expert-policy lru", 2, "--expert-policy lru needs --expert-memory"),
    ("serve --nnodes 2", 2, "--nnodes 2 needs a rank for each node: --expert-parallel-size"),
    ("serve --nnodes 2 --expert-parallel-size 2", 2, "--nnodes needs --rdzv-endpoint HOST:PORT"),
    ("serve --enforce-eager", 2, "--enforce-eager True needs --device cuda"),
    # Flags of other servers
    ("serve --ctx-size 4096", 2, "No such option: --ctx-size. Here --max-model-len sets the context."),
    ("serve -c 4096", 2, "No such option: -c. Here --max-model-len sets the context."),
    ("serve --model x", 2, "No such option: --model. Here MODEL is the first argument."),
    ("serve -m x.gguf", 2, "No such option: -m. Here MODEL is the first argument."),
    ("serve --tp-size 2", 2, "No such option: --tp-size. Here --tensor-parallel-size N is for heads"),
    ("serve -ngl 99", 2, "No such option: -ngl. Here a model is whole on one device, see --device."),
    ("serve --expert-quantization int4", 2, "Here --quantization experts=FORM rounds the experts alone."),
    ("serve --prot 1", 2, "(Did you mean one of: '--host', '--port'?)"),
    # Models
    ("serve $folder/none", 1, "There is no folder $folder/none."),
    ("serve ./none.gguf", 1, "There is no file none.gguf."),
    ("serve none.gguf", 1, "There is no file none.gguf."),
    ("serve https://huggingface.co/owner/name", 1, "Model owner/name is not completely in the cache"),
    ("serve hf.co/owner/name:Q4_K_M", 1, "Model owner/name is not completely in the cache"),
    ("serve owner/name", 1, "start once with a network to download it"),
    ("serve qwen3:30b-a3b", 2, "a name of Ollama's library"),
    ("serve https://example.com/model", 2, "is a link"),
    ("serve not-a-model", 1, "Model not-a-model is not completely in the cache"),
    ("serve $folder/ggufs", 1, "holds GGUF files alone: name one, as $folder/ggufs/model-Q4_K_M.gguf"),
    ("serve $folder/damaged.gguf", 1, "damaged.gguf is of GGUF version 2021161080, and versions 2 and 3 are read"),
    (
        "serve $folder/truncated.gguf",
        1,
        "truncated.gguf is truncated, 469816 of 470304 bytes are there",
    ),
    ("serve $folder/pointer.gguf", 1, "git lfs pull"),
    ("serve $folder/weightless", 1, "$folder/weightless has no weights: there is no *.safetensors file in it."),
    ("serve $folder/runtime", 1, "has no config.json, so it is not a model folder."),
    ("serve $folder/pickled", 1, "has its weights only in a pickle format (pytorch_model.bin)"),
    ("verify $folder/none", 1, "There is no folder $folder/none."),
    ("pull ./here", 1, "./here is a path on this machine: name a model of the hub, as owner/name."),
    ("doctor $folder/none", 1, "There is no folder $folder/none."),
    ("doctor $folder/strange", 1, "strange_moe"),
    ("doctor --gpus 8xZ9000 $folder/strange", 2, "Z9000"),
    # Other commands
    ("serv", 2, "No such command 'serv'"),
    ("launch", 2, "Missing argument 'AGENT'"),
    ("launch nobody", 2, "'nobody' is not one of 'codex', 'claude'"),
    (
        "launch --kv-cache-memory 12GiB codex",
        2,
        "no option here: --set kv-cache-memory=VALUE gives a setting",
    ),
    ("launch --set kv-cache-memry=12GiB codex", 2, "did you mean kv-cache-memory?"),
    ("PATH=/nowhere launch --url 127.0.0.1:1 codex", 1, "`npm install -g @openai/codex` installs it."),
    ("run-batch $folder/none.jsonl out.jsonl", 2, "'$folder/none.jsonl' does not exist"),
    ("cache list $folder/none", 1, "$folder/none"),
    ("key new 'a b'", 2, "`name=` takes up to 64 letters"),
]

# Settings that only the process of the model can judge. They are one sentence too, and nothing behind it.
OF_THE_MODEL = [
    ("--kv-cache-memory 900GB", "--kv-cache-memory asks for 838.2 GiB; beside the weights only"),
    ("--max-model-len 100000", "--max-model-len 100000 exceeds the model's 65536 tokens."),
    ("--expert-memory 1KiB", "--expert-memory"),
    ("--expert-parallel-size 3", "4 experts cannot be shared equally among 3 ranks."),
    ("--pipeline-parallel-size 40", "--pipeline-parallel-size 40 is more than the"),
    ("--pipeline-parallel-size 2 --layers-per-rank 9,9", "--layers-per-rank 9,9 is not 2 numbers that add up to"),
    ("--tensor-parallel-size 16", "2 KV heads of this mixtral model cannot be shared"),
    ("--device cuda", "make venv TORCH=cuda"),
]

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> str:
    return json.dumps(CHAT | fields)


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}
EMBEDDINGS = "for embeddings and ranking run a server for these models beside it"
FOR_OLLAMA = "this server"

# Method and path, body, headers, the status, and what the sentence says.
REQUESTS: list[tuple[str, str | None, dict[str, str], int, str]] = [
    (
        "POST /v1/chat/completions",
        chat(model="gpt-4"),
        {},
        404,
        "The model `gpt-4` does not exist: this server has `tiny`",
    ),
    ("POST /v1/chat/completions", "{", {}, 400, "not valid JSON"),
    ("POST /v1/chat/completions", "", {}, 400, "empty"),
    ("POST /v1/chat/completions", "[]", {}, 400, "object"),
    ("POST /v1/chat/completions", "{}", {}, 400, "messages"),
    ("POST /v1/chat/completions", chat(max_tokens=0), {}, 400, "max_tokens"),
    ("POST /v1/chat/completions", chat(temperature="hot"), {}, 400, "temperature"),
    ("POST /v1/chat/completions", chat(messages=[]), {}, 400, "messages"),
    ("POST /v1/chat/completions", chat(messages=[PICTURE]), {}, 400, "messages[0].content[0]"),
    ("POST /v1/chat/completions", chat(response_format=BAD_SCHEMA), {}, 400, "strin"),
    ("POST /v1/chat/completions", chat(audio={}), {}, 400, "audio"),
    ("POST /v1/chat/completions", chat(), {"content-type": "text/plain"}, 415, "content-type: application/json"),
    ("POST /v1/chat/completions", chat(), {"origin": "https://evil.example"}, 403, "--cors-allow-origin"),
    ("POST /v1/chat/completions", chat(), {"host": "evil.example"}, 403, "--allowed-host"),
    (
        "POST /v1/completions",
        '{"model": "tiny", "prompt": "' + "x" * 513 + '"}',
        {},
        400,
        "maximum context length is 512",
    ),
    ("POST /chat/completions", chat(), {}, 404, "There is no /chat/completions here, but /v1/chat/completions"),
    ("GET /v1/chat/completions", None, {}, 405, "does not answer GET, but POST"),
    ("GET /v1/nothing", None, {}, 404, "GET /openapi.json lists what there is"),
    ("GET /v1/models/gpt-4", None, {}, 404, "gpt-4"),
    ("POST /v1/embeddings", '{"input": "a"}', {}, 404, EMBEDDINGS),
    ("POST /api/embed", '{"input": "a"}', {}, 404, EMBEDDINGS),
    ("POST /api/create", "{}", {}, 404, "it serves the one that it was started with"),
    ("POST /v1/images/generations", "{}", {}, 404, "text"),
    ("POST /v1/messages", chat(), {}, 400, "max_tokens"),
    ("POST /v1/responses", '{"model": "tiny", "input": "a", "previous_response_id": "resp_x"}', {}, 404, "resp_x"),
]

# The same of a server with keys.
KEYED: list[tuple[str, dict[str, str], int, str]] = [
    ("POST /v1/chat/completions", {}, 401, "An API key is required: send it as `Authorization: Bearer KEY`"),
    (
        "POST /v1/chat/completions",
        {"authorization": "Bearer wrong"},
        401,
        "The API key that was sent is none of this server's",
    ),
    ("GET /metrics", {"authorization": "Bearer sk-user"}, 403, "a line `metrics:KEY` in the file of `--api-key-file`"),
    ("POST /sleep", {"authorization": "Bearer sk-user"}, 403, "a line `admin:KEY` in the file of `--api-key-file`"),
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Files that are wrong in different ways, in a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="m-") as name:
        folder = Path(name)
        texts = {"typo.toml": "prot = 1", "broken.toml": "port = 1\nhost = \n", "table.toml": "[http]\nport = 1\n"}
        texts |= {"limits": "user:sk-a tokens=many", "pointer.gguf": "version https://git-lfs.github.com/spec/v1\n"}
        texts |= {"empty": ""}
        texts |= {"damaged.gguf": "GGUF" + 100 * "x"}
        for file, text in texts.items():
            (folder / file).write_text(text)
            (folder / file).chmod(0o600)
        (folder / "ggufs").mkdir()
        for kind in ("Q4_K_M", "Q8_0"):
            (folder / "ggufs" / f"model-{kind}.gguf").write_bytes(b"GGUF")
        write_gguf(folder / "whole.gguf")
        (folder / "truncated.gguf").write_bytes((folder / "whole.gguf").read_bytes()[:-1000])
        for name in ("weightless", "pickled", "strange"):
            write_model_dir(folder / name)
            (folder / name / "config.json").write_text('{"model_type": "mixtral"}')
        (folder / "pickled" / "pytorch_model.bin").write_bytes(b"x")
        (folder / "strange" / "config.json").write_text('{"model_type": "strange_moe"}')
        yield folder


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def moeserve(words: list[str], folder: Path) -> tuple[int, str]:
    """Return the exit code and standard error of a command, before whose words variables may be set."""
    count = next(number for number, word in enumerate(words) if "=" not in word)
    variables = dict(word.split("=", 1) for word in words[:count])
    runtime = folder / "runtime"
    runtime.mkdir(exist_ok=True, mode=0o700)
    own = {"XDG_RUNTIME_DIR": str(runtime), "MOESERVE_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with popen(
        [sys.executable, "-m", "launcher.cli", *words[count:]],
        cwd=ROOT,
        env=os.environ | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors + out
    return process.returncode, errors


@pytest.mark.parametrize(("typed", "code", "sentence"), COMMANDS, ids=[command for command, _, _ in COMMANDS])
def test_a_command_that_cannot_be_done_says_why(typed: str, code: int, sentence: str, folder: Path, taken: int) -> None:
    values = {"folder": str(folder), "taken": str(taken)}
    port = " --port 0" if " serve" in f" {typed}" and "--port" not in typed else ""
    ended, errors = moeserve(shlex.split(Template(typed + port).substitute(values)), folder)
    assert (ended, Template(sentence).substitute(values) in " ".join(errors.split())) == (code, True), errors
    assert '{"' not in errors


@pytest.mark.parametrize(("flags", "sentence"), OF_THE_MODEL)
def test_a_setting_that_the_model_or_the_machine_does_not_allow_is_one_sentence_and_code_two(
    flags: str, sentence: str, folder: Path, model: Path
) -> None:
    code, errors = moeserve(["serve", str(model), "--port", "0", *flags.split()], folder)
    assert (code, sentence in errors) == (2, True), errors
    assert errors.splitlines()[-1].startswith("Error: ")
    assert '{"' not in errors


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend")) as running:
        running.engine.script = say("ok")
        yield running


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("keyed"), api_key=("sk-user",)) as running:
        yield running


def sentence_of(server: Frontend, call: str, body: str | None, headers: dict[str, str]) -> tuple[int, str]:
    method, path = call.split()
    usual = {"content-type": "application/json"} if body is not None else {}
    response = server.http.request(method, path, content=body, headers=usual | headers)
    error = response.json()["error"]
    return response.status_code, error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(("call", "body", "headers", "status", "sentence"), REQUESTS)
def test_a_request_that_cannot_be_answered_says_why(
    call: str, body: str | None, headers: dict[str, str], status: int, sentence: str, server: Frontend
) -> None:
    got, said = sentence_of(server, call, body, headers)
    assert (got, sentence in said) == (status, True), said


@pytest.mark.parametrize(("call", "headers", "status", "sentence"), KEYED)
def test_a_request_without_the_right_key_says_which_it_needs(
    call: str, headers: dict[str, str], status: int, sentence: str, keyed: Frontend
) -> None:
    got, said = sentence_of(keyed, call, None if call.startswith("GET") else "{}", headers)
    assert (got, sentence in said) == (status, True), said


def test_a_body_that_curl_declares_as_a_form_is_read(server: Frontend) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert server.http.post("/v1/chat/completions", content=chat(), headers=headers).status_code == 200


def test_a_request_that_names_no_model_gets_the_one_that_is_served(server: Frontend) -> None:
    assert server.http.post("/v1/chat/completions", json={"messages": CHAT["messages"]}).status_code == 200
