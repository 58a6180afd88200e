"""Which files of a hub repository are one GGUF model. Nothing here reaches the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moeserve.model.spec import ModelError

# The kind of quantisation at the end of a file's name, before the number of its part.
_KIND = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf$", re.I)
_PART = re.compile(r"-\d{5}-of-")
# Encoders of images, and heads that predict further tokens, which lie beside models.
_NO_MODEL = re.compile(r"(?:^|/)(?:mmproj|mtp)[-_.]", re.I)


def split_name(model: str) -> tuple[str, str | None]:
    """Return repository and kind of `owner/name:Q4_K_M`, or the file in place of the kind; None for a name without."""
    repository, colon, kind = model.partition(":")
    return repository, kind if colon else None


def kinds_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files of a repository by kind in capitals, the parts of a model in order."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        found = _KIND.search(name)
        if found is not None and not _NO_MODEL.search(name):
            kinds.setdefault(found[1].upper(), []).append(name)
    return kinds


def kind_of(name: str) -> str | None:
    """Return the kind in the name of a GGUF file, in capitals; None without one."""
    found = _KIND.search(name)
    return None if found is None else found[1].upper()


def models_of(names: Iterable[str]) -> list[list[str]]:
    """Return the files of each GGUF model among the names, its parts in order; none of encoders and heads beside it."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not _NO_MODEL.search(name):
            models.setdefault(_PART.sub("-of-", name), []).append(name)
    return list(models.values())


def choose_files(repository: str, kind: str, names: Iterable[str]) -> list[str]:
    """Return the files of the model of a kind, or of the model that a file belongs to, whose name stands for the kind.

    Raise ModelError, which lists the kinds that there are.
    """
    names = list(names)
    kinds = kinds_of(names)
    if not kind:
        raise ModelError(f"{repository}: names no kind of file behind the colon{_listed(kinds)}.")
    if kind.lower().endswith(".gguf"):
        if kind not in names:
            raise ModelError(f"Model {repository} has no file {kind}{_listed(kinds)}.")
        return sorted(name for name in names if _PART.sub("-of-", name) == _PART.sub("-of-", kind))
    if kind.upper() not in kinds:
        raise ModelError(f"Model {repository} has no GGUF file of kind {kind}{_listed(kinds)}.")
    files = kinds[kind.upper()]
    models = {_PART.sub("-of-", name) for name in files}
    if len(models) > 1:
        raise ModelError(
            f"Model {repository} has {len(models)} GGUF models of kind {kind}: name a file of one, as "
            f"{repository}:{files[0]}."
        )
    return files


def only_gguf_sentence(repository: str, names: Iterable[str]) -> str | None:
    """Return what to say of a repository that holds GGUF files alone; None if it holds none."""
    kinds = kinds_of(names)
    if not kinds:
        return None
    example = next((kind for kind in ("Q4_K_M", "Q8_0") if kind in kinds), next(iter(kinds)))
    return f"Model {repository} has GGUF files alone: name one by its kind, as {repository}:{example}{_listed(kinds)}."


def only_files_sentence(folder: str, names: Iterable[str]) -> str | None:
    """Return what to say of a folder that holds GGUF models alone; None if it holds none."""
    models = models_of(names)
    if not models:
        return None
    example = f"{folder}/{models[0][0]}"
    which = "" if len(models) == 1 else f"; moeserve doctor {folder} says which to take"
    return f"{folder} holds GGUF files alone: name one, as {example}{which}."


def _listed(kinds: Iterable[str]) -> str:
    shown = ", ".join(kinds)
    return f"; these are there: {shown}" if shown else ""
