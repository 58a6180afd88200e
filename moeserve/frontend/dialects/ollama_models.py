"""The descriptions of models in Ollama's API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend.dialects import bodies
from moeserve.frontend.dialects.ollama import rfc3339, served_name

# Clients compare numbers: the release of Ollama that has all that is here, `/v1/responses` and `/v1/messages` too.
VERSION = "0.14.0"
RUNNING = "Ollama is running"

# What the name of a file or a branch says of its quantisation, as in `model-Q4_K_M.gguf`.
_LEVEL = re.compile(r"(?:IQ|TQ|Q)\d\w*|MXFP4\w*|BF16|F16|F32", re.IGNORECASE)


class NameBody(msgspec.Struct):
    """A body that names a model; `name` is the older field."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class About:
    """The facts that descriptions tell. num_bytes: of the weights. context: tokens, None while the model loads.

    is_gguf: the weights are in a GGUF file. level: how they are kept, in the words of the file or of the engine.
    capabilities: in Ollama's words.
    """

    architecture: str
    created: int
    digest: str
    num_bytes: int
    context: int | None
    is_gguf: bool
    level: str
    capabilities: tuple[str, ...]

    @property
    def modified_at(self) -> str:
        return rfc3339(self.created)

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf" if self.is_gguf else "safetensors",
            "family": self.architecture,
            "families": [self.architecture],
            "parameter_size": "",
            "quantization_level": self.level,
        }

    def listed(self, name: str) -> dict[str, Any]:
        """Return a model's entry in the list."""
        return {
            "name": name,
            "model": name,
            "modified_at": self.modified_at,
            "size": self.num_bytes,
            "digest": self.digest,
            "details": self.details,
        }

    def loaded(self, name: str, expires: int) -> dict[str, Any]:
        """Return a model's entry among those in memory. expires: UNIX time."""
        own = {"expires_at": rfc3339(expires), "size_vram": self.num_bytes, "context_length": self.context or 0}
        return {**self.listed(name), **own}

    def shown(self, name: str) -> dict[str, Any]:
        """Return a model's description."""
        context = {} if self.context is None else {f"{self.architecture}.context_length": self.context}
        return {
            "modelfile": "",
            "parameters": "" if self.context is None else f"num_ctx {self.context}",
            "template": "{{ .Prompt }}",
            "details": self.details,
            "model_info": {"general.architecture": self.architecture, "general.basename": name, **context},
            "capabilities": list(self.capabilities),
            "modified_at": self.modified_at,
        }


def read_name(body: bytes, names: Sequence[str], *, takes_any: bool) -> tuple[NameBody, str]:
    """Return a body that names a model, and the served name that it means. Raise ApiError."""
    asked, _ = bodies.decode_json(body, NameBody)
    return asked, served_name(asked.model or asked.name, names, takes_any=takes_any)


def level_of(model: str) -> str:
    """Return the quantisation that the last part of a model's path tells, nothing where it tells none."""
    found = _LEVEL.findall(model.rpartition("/")[2])
    return str(found[-1]).upper() if found else ""
