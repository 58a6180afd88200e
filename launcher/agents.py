"""Terminal agents: the settings that make each ask a server of moeserve, for one session alone.

Nothing here writes into a user's own configuration: settings are environment variables, arguments, and files in a
folder of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KEY = "MOESERVE_AGENT_KEY"  # the variable in which agents that read a key from one find it
# Milliseconds that an agent waits for the next event of an answer. Its first prompt has 9,000 to 21,000 tokens, which a
# few cores compute for minutes; agents' own limits are 4 to 10 minutes.
_PATIENCE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Server:
    """The server that an agent asks. `url`: without `/v1`. `context`: tokens of prompt and answer together; `answer`:
    of an answer."""

    url: str
    model: str
    context: int
    answer: int
    key: str = "none"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments to be put before the user's own, variables to set, and variables to remove from the environment.

    files: their content by path. setup: arguments with which the agent writes its own configuration, before it starts.
    """

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """A terminal agent: its program, the command that installs it, and its settings for a server.

    settings: of a server and a folder of this session, in which files may be written.
    """

    title: str
    program: str
    install: str
    settings: Callable[[Server, Path], Settings]


def _codex(server: Server, _: Path) -> Settings:
    waits = f"stream_idle_timeout_ms={_PATIENCE_MS}"
    provider = f'{{name="moeserve", base_url="{server.v1}", env_key="{_KEY}", wire_api="responses", {waits}}}'
    options = {
        "model_provider": '"moeserve"',
        "model_providers.moeserve": provider,
        "model": json.dumps(server.model),
        "model_context_window": str(server.context),
    }
    arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return Settings(tuple(arguments), {_KEY: server.key})


def _claude(server: Server, _: Path) -> Settings:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    tiers = tuple(f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("HAIKU", "SONNET", "OPUS"))
    waits = ("API_TIMEOUT_MS", "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS")
    return Settings(
        variables={
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
            # Without it 32,000, and a small model may write that many.
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            **dict.fromkeys((*models, *tiers), server.model),
            **dict.fromkeys(waits, str(_PATIENCE_MS)),
        },
        # It would go before the token.
        removed=("ANTHROPIC_API_KEY",),
    )


def _opencode(server: Server, _: Path) -> Settings:
    # It wants to know how long an answer may be, too; the server cuts what does not fit.
    limit = {"context": server.context, "output": server.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "moeserve",
        "options": {"baseURL": server.v1, "apiKey": server.key, "timeout": _PATIENCE_MS},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    name = f"moeserve/{server.model}"
    config = {"provider": {"moeserve": provider}, "model": name, "small_model": name, "autoupdate": False}
    variables = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return Settings(variables=variables)


def _qwen(server: Server, _: Path) -> Settings:
    variables = {"OPENAI_BASE_URL": server.v1, "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    variables["QWEN_STREAM_IDLE_TIMEOUT_MS"] = str(_PATIENCE_MS)
    return Settings(("--auth-type", "openai"), variables)


def _openai_variables(server: Server) -> dict[str, str]:
    """Return the variables of OpenAI's own clients and of LiteLLM."""
    return {"OPENAI_API_KEY": server.key, "OPENAI_BASE_URL": server.v1, "OPENAI_API_BASE": server.v1}


def _pi(server: Server, folder: Path) -> Settings:
    free = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    model: dict[str, Any] = {
        "id": server.model,
        "name": server.model,
        "reasoning": False,
        "input": ["text"],
        "cost": free,
    }
    model |= {"contextWindow": server.context, "maxTokens": server.answer}
    provider = {"baseUrl": server.v1, "api": "openai-completions", "apiKey": _KEY, "models": [model]}
    extension = folder / "moeserve.js"
    text = f'export default (pi) => pi.registerProvider("moeserve", {json.dumps(provider)});\n'
    arguments = ("--extension", str(extension), "--provider", "moeserve", "--model", server.model)
    return Settings(arguments, {_KEY: server.key}, files={extension: text})


def _cline(server: Server, folder: Path) -> Settings:
    setup = ("auth", "openai-compatible", "-k", server.key, "-m", server.model, "-b", server.v1)
    return Settings(variables={"CLINE_DIR": str(folder), "CLINE_DATA_DIR": str(folder / "data")}, setup=setup)


def _continue(server: Server, folder: Path) -> Settings:
    options = {"contextLength": server.context, "maxTokens": server.answer}
    model: dict[str, Any] = {"name": server.model, "provider": "openai", "model": server.model, "apiBase": server.v1}
    model |= {"apiKey": server.key, "roles": ["chat"], "capabilities": ["tool_use"]}
    model |= {"defaultCompletionOptions": options, "requestOptions": {"timeout": _PATIENCE_MS // 1000}}
    config = {"name": "moeserve", "version": "0.0.1", "schema": "v1", "models": [model]}
    file = folder / "config.yaml"
    return Settings(("--config", str(file)), files={file: json.dumps(config)})  # JSON is YAML too


def _gptme(server: Server, _: Path) -> Settings:
    arguments = ("--model", f"local/{server.model}", "--tool-format", "tool")
    return Settings(arguments, {**_openai_variables(server), "LLM_API_TIMEOUT": str(_PATIENCE_MS // 1000)})


def _mini(server: Server, _: Path) -> Settings:
    variables = {**_openai_variables(server), "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    return Settings(("--model", f"openai/{server.model}"), variables)


def _aider(server: Server, folder: Path) -> Settings:
    name, file = f"openai/{server.model}", folder / "metadata.json"
    limits = {"max_input_tokens": server.context, "max_output_tokens": server.answer}
    arguments = ("--model", name, "--model-metadata-file", str(file), "--timeout", str(_PATIENCE_MS // 1000))
    return Settings(arguments, _openai_variables(server), files={file: json.dumps({name: limits})})


def _goose(server: Server, _: Path) -> Settings:
    variables = {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": server.model, "GOOSE_CONTEXT_LIMIT": str(server.context)}
    variables |= {"OPENAI_HOST": server.url, "OPENAI_BASE_PATH": "v1/chat/completions", "OPENAI_API_KEY": server.key}
    return Settings(variables={**variables, "OPENAI_TIMEOUT": str(_PATIENCE_MS // 1000)})


def _crush(server: Server, folder: Path) -> Settings:
    model: dict[str, Any] = {"id": server.model, "name": server.model, "context_window": server.context}
    model["default_max_tokens"] = server.answer
    provider = {"type": "openai-compat", "base_url": server.v1, "api_key": server.key, "models": [model]}
    chosen = {"model": server.model, "provider": "moeserve"}
    config = {"providers": {"moeserve": provider}, "models": {"large": chosen, "small": chosen}}
    # What was chosen in an earlier session lies in its data and would go first.
    variables = {"CRUSH_GLOBAL_CONFIG": str(folder / "config"), "CRUSH_GLOBAL_DATA": str(folder / "data")}
    return Settings(variables=variables, files={folder / "config" / "crush.json": json.dumps(config)})


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("Codex CLI", "codex", "npm install -g @openai/codex", _codex),
    "claude": Agent("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "opencode": Agent("opencode", "opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "pi": Agent("pi", "pi", "npm install -g @mariozechner/pi-coding-agent", _pi),
    "cline": Agent("cline", "cline", "npm install -g cline", _cline),
    "continue": Agent("Continue", "cn", "npm install -g @continuedev/cli", _continue),
    "crush": Agent("Crush", "crush", "npm install -g @charmland/crush", _crush),
    "goose": Agent("goose", "goose", "brew install block-goose-cli", _goose),
    "gptme": Agent("gptme", "gptme", "pipx install gptme", _gptme),
    "mini": Agent("mini-swe-agent", "mini", "pipx install mini-swe-agent", _mini),
    "aider": Agent("aider", "aider", "pipx install aider-chat", _aider),
}
