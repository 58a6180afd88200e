"""Terminal agents: the settings that make each ask a server of moeserve, for one session alone.

Nothing here writes into a user's own configuration: settings are environment variables and arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
    """Arguments to be put before the user's own, variables to set, and variables to remove from the environment."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """A terminal agent: its program, the command that installs it, and its settings for a server."""

    title: str
    program: str
    install: str
    settings: Callable[[Server], Settings]


def _codex(server: Server) -> Settings:
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


def _claude(server: Server) -> Settings:
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


def _opencode(server: Server) -> Settings:
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


def _qwen(server: Server) -> Settings:
    variables = {"OPENAI_BASE_URL": server.v1, "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    variables["QWEN_STREAM_IDLE_TIMEOUT_MS"] = str(_PATIENCE_MS)
    return Settings(("--auth-type", "openai"), variables)


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("Codex CLI", "codex", "npm install -g @openai/codex", _codex),
    "claude": Agent("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "opencode": Agent("opencode", "opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen),
}
