"""MODEL as people write it: links to a hub's pages and names of other programs."""

from __future__ import annotations

import re
from pathlib import Path

# The page of a model, or of a branch or file of it, on the hub; Ollama writes hf.co without a scheme.
_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(.+)")
_OTHER_LINK = re.compile(r"[a-z]+://")
_OLLAMA = re.compile(r"[\w.-]+:[\w.-]+")


def read_model(given: object) -> str:
    """Return the MODEL that a text names, without the address of the hub. Raise ValueError, a clause."""
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{given!r} is not a text that is not empty")
    text = given.strip()
    if Path(text).exists():
        return text
    if (found := _HUB.fullmatch(text)) is not None:
        return _of_page(found[1].partition("?")[0].strip("/"))
    if _OTHER_LINK.match(text):
        raise ValueError(f"{text!r} is a link: name a folder, a file, or a model of the hub, as owner/name")
    if _OLLAMA.fullmatch(text):
        raise ValueError(f"{text!r} is a name of Ollama's library: name a model of the hub, as owner/name:Q4_K_M")
    return text


def _of_page(path: str) -> str:
    """Return `owner/name`, or `owner/name:FILE.gguf` for the page of such a file."""
    owner_and_name, _, rest = path.partition("/blob/") if "/blob/" in path else path.partition("/resolve/")
    file = rest.partition("/")[2]
    if file.endswith(".gguf"):
        return f"{owner_and_name}:{file}"
    return owner_and_name.partition("/tree/")[0]
