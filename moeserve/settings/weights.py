"""The setting `--quantization`: the forms of few bits to which weights are rounded while they are loaded."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

# The forms of all weights, and those of experts alone.
_FORMS = ("none", "int8", "int4")
_EXPERT_FORMS = ("int8", "fp8", "int4")
# The methods of quantised checkpoints, which other servers take here.
_OF_CHECKPOINTS = ("awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "nvfp4", "auto-round", "gguf")
_GGUF_KIND = re.compile(r"(?:IQ|TQ|Q)\d\w*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WeightForms:
    """The form of all weights outside of experts and that of the experts; `none` is the checkpoint's."""

    others: str = "none"
    experts: str = "none"


def parse_quantization(text: str) -> WeightForms:
    """Return the forms that `int8`, `experts=int4` or `int8,experts=int4` asks for.

    Raise ValueError, a clause, for forms that there are not.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, is_set, form = (word.strip() for word in part.rpartition("="))
        if is_set and key != "experts":
            raise ValueError(f"{key[:80]!r} is no part of a model; did you mean experts={form[:80]}?")
        _check_form(form, key)
        if key in given:
            raise ValueError(f"{text.strip()[:80]!r} gives the same weights two forms; write it as int8,experts=int4")
        given[key] = form
    others = given.get("", "none")
    return WeightForms(others, given.get("experts", others))


def _check_form(form: str, key: str) -> None:
    """Raise ValueError, a clause, for a text that is no form of the experts, or, without a key, of all weights."""
    forms = _EXPERT_FORMS if key else _FORMS
    if form in forms:
        return
    if _GGUF_KIND.fullmatch(form):
        raise ValueError(f"{form!r} is a kind of GGUF file: name it behind the model, as owner/name:{form}")
    if form in _EXPERT_FORMS:
        raise ValueError(f"{form!r} is for the experts: experts={form}; a checkpoint in {form} stays as it is without")
    if form.lower() in _OF_CHECKPOINTS:
        raise ValueError(f"{form!r} is a form of checkpoints, which are read as they are: leave it out")
    close = difflib.get_close_matches(form.lower(), forms, n=1)
    hint = f"; did you mean {key and 'experts='}{close[0]}?" if close else ""
    raise ValueError(f"{form[:80]!r} is not one of {', '.join(forms)}{hint}")
