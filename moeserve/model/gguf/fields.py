"""The fields of a GGUF file, each of the kind that it has to be. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from moeserve.model.spec import CheckpointError, UnsupportedModel

_MOST_LAYERS = 2**16  # a damaged count takes no more memory
VOCABULARY = "tokenizer.ggml."  # how the names of a tokenizer's fields begin


def plain(value: Any) -> Any:
    """Return a list for an array of numbers, and any other value as it is."""
    return value.tolist() if isinstance(value, array) else value


class TypedFields:
    """The fields whose names begin with `start`. Raise CheckpointError for a missing one, or one of another kind."""

    def __init__(self, metadata: Mapping[str, Any], start: str) -> None:
        self._metadata, self._start = metadata, start
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"The GGUF file lacks the field {self._start}{name}.")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._metadata.get(self._start + name)
        return default if value is None else value

    def unread(self) -> dict[str, Any]:
        """Return the fields that nothing has asked for yet."""
        own = {name.removeprefix(self._start): name for name in self._metadata if name.startswith(self._start)}
        return {name: self._metadata[whole] for name, whole in own.items() if name not in self._read}

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number; of an array, one per layer, the one of all layers that have not 0."""
        value = self[name] if default is None else self.get(name, default)
        if isinstance(value, list | array):
            count = self.get("block_count")
            numbers = set(value[: count if isinstance(count, int) else None]) - {0} or {0}
            if len(numbers) > 1:
                raise UnsupportedModel(f"Layers of a GGUF model that differ in {name} are not supported.")
            (value,) = numbers
        if type(value) is not int:
            self._refuse(name, "whole number")
        return value

    def per_layer(self, name: str, num_layers: int | None = None) -> list[int]:
        """Return a whole number or truth value for each layer. num_layers: None for all layers of the file."""
        value, count = plain(self[name]), self.count("block_count") if num_layers is None else num_layers
        numbers = value if isinstance(value, list) else [value] * min(count, _MOST_LAYERS)
        if len(numbers) < count or not all(isinstance(number, int) for number in numbers):
            self._refuse(name, "array of whole numbers, one for each layer")
        return numbers

    def whole(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number, or the default without one."""
        value = self.get(name, default)
        if value is not None and type(value) is not int:
            self._refuse(name, "whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a float32 number as the shortest decimal that gives it: 1e-6, not 9.999999974752427e-07."""
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._refuse(name, "number")
        return float(f"{value:.7g}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, int | float) or value not in (0, 1):
            self._refuse(name, "truth value")
        return bool(value)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.get(name, default)
        if value is not None and not isinstance(value, str):
            self._refuse(name, "text")
        return value

    def texts(self, name: str) -> list[str] | None:
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            self._refuse(name, "array of texts")
        return value

    def numbers(self, name: str) -> Sequence[float] | None:
        value = self.get(name)
        is_list = isinstance(value, list) and all(isinstance(one, int | float) for one in value)
        if not (value is None or is_list or isinstance(value, array)):
            self._refuse(name, "array of numbers")
        return value

    def _refuse(self, name: str, kind: str) -> NoReturn:
        raise CheckpointError(f"The field {self._start}{name} is no {kind}.")
