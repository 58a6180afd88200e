"""The model that `--serve auto` means: the best of a short list (`known_models.json`) that fits this machine."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeserve.config import ServeConfig
from moeserve.settings.quantities import show_size

if TYPE_CHECKING:
    from moeserve.engine.gguf_choice import FileChoice
    from moeserve.machine import Machine
    from moeserve.model.spec import DecoderSpec

# Tokens: the context that terminal agents work with; docs/clients.md has the sizes of their first prompts.
TOKENS_OF_AGENTS = 32_000
_LIST = Path(__file__).with_name("known_models.json")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of the list, as this machine would serve it. is_here: its files are in the hub library's cache."""

    choice: FileChoice
    is_here: bool

    @property
    def fits(self) -> bool:
        """True if the model and the context of an agent fit."""
        return self.choice.obstacle is None and (self.choice.kv_tokens or 0) >= TOKENS_OF_AGENTS

    def in_words(self) -> str:
        choice = self.choice
        size = show_size(choice.num_bytes)
        parts = [choice.name, f"{size} in the cache" if self.is_here else f"a download of {size}"]
        if choice.kv_tokens is not None:
            parts.append(f"{choice.kv_tokens:,} tokens of context")
        if choice.tokens_per_second is not None:
            parts.append(f"at most {choice.tokens_per_second:,.0f} tokens/s as memory is read")
        return ", ".join(parts)


def candidates(machine: Machine, config: ServeConfig) -> list[Candidate]:
    """Describe the models of the list on a machine, the best model first."""
    from moeserve.engine.gguf_choice import choices_of_hub

    found = []
    for known in json.loads(_LIST.read_text()):
        repository, _, kind = known["name"].partition(":")
        here = _bytes_here(repository, kind)
        sizes = {kind: here or int(known["gigabytes"] * 10**9)}
        (choice,) = choices_of_hub(repository, sizes, _spec_of(known["config"]), machine, config)
        found.append(Candidate(choice, here > 0))
    return found


def _bytes_here(repository: str, kind: str) -> int:
    """Return the bytes of a model's files in the hub library's cache, 0 without any."""
    from moeserve.model.source import hub_gguf_sizes

    return hub_gguf_sizes(repository, revision=None, offline=True)[0].get(kind, 0)


def _spec_of(config: dict[str, Any]) -> DecoderSpec:
    from moeserve.model.families import build_spec, load_config

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return build_spec(load_config(Path(folder)))
