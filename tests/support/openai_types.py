"""Types of the openai package, which takes a second to import: each process of the tests collects all files, and a few
tests need it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@cache
def openai_type(name: str) -> TypeAdapter[Any]:
    """Return what validates a type of `openai.types`, `chat.ChatCompletion` for one."""
    from pydantic import TypeAdapter

    module, _, of_module = f"openai.types.{name}".rpartition(".")
    return TypeAdapter(getattr(import_module(module), of_module))
