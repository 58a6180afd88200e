"""How good a built model is, as its build measured it."""

from pathlib import Path

import msgspec

QUALITY_NAME = "quality.json"


class Quality(msgspec.Struct, frozen=True):
    """Perplexities over `tokens` tokens of `text`."""

    text: str
    tokens: int
    dense: float
    split: float


def read_quality(folder: Path) -> Quality:
    return msgspec.json.decode((folder / QUALITY_NAME).read_bytes(), type=Quality)
