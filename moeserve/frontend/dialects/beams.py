"""The fields of beam search in chat and completions, with the meaning that they had in vLLM."""

from __future__ import annotations

from typing import Any

from moeserve.frontend import limits
from moeserve.frontend.dialects.fields import SamplingBody, bounded, read_n
from moeserve.frontend.http import ApiError, invalid
from moeserve.plan import BeamParams

_SWITCH = "use_beam_search"
# Fields that would have to change the search, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "stop": (None, []),
}
# Fields that ask for nothing without a search.
_OF_SEARCHES = ("length_penalty", "early_stopping")


class SearchBody(SamplingBody, kw_only=True):
    """The fields of the dialects that search."""

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None


def read_beams(body: SearchBody, logprobs: int | None) -> BeamParams | None:
    """Return the search that a body asks for, None for none. Raises ApiError.

    logprobs: alternatives to each token of the answer, None for none.
    """
    penalty, most = 1.0 if body.length_penalty is None else body.length_penalty, limits.MAX_LENGTH_PENALTY
    bounded("length_penalty", penalty, -most, most)
    early = body.early_stopping or False
    if isinstance(early, str) and early != "never":
        raise invalid('`early_stopping` must be true, false or "never"', "early_stopping")
    if not body.use_beam_search:
        return None
    n = read_n(body)
    width = n if body.best_of is None else body.best_of
    if not max(2, n) <= width <= limits.MAX_N:
        field = "n" if body.best_of is None else "best_of"
        raise invalid(f"`{field}` is the number of beams: at least 2, at least `n`, at most {limits.MAX_N}", field)
    for name, values in _REFUSED.items():
        if getattr(body, name) not in values:
            raise _apart(name)
    if getattr(body, "cache_hit_threshold", None):
        raise _apart("cache_hit_threshold")
    if body.prompt_logprobs is not None and body.prompt_logprobs is not False:
        raise _apart("prompt_logprobs")
    if body.max_tokens == 0:
        raise _apart("max_tokens")
    return BeamParams(width, n, float(penalty), "never" if early == "never" else bool(early), logprobs)


def without_search(body: SearchBody) -> tuple[str, ...]:
    """Return the fields of searches in a body that asks for none."""
    return () if body.use_beam_search else tuple(name for name in _OF_SEARCHES if getattr(body, name) is not None)


def _apart(name: str) -> ApiError:
    return invalid(f"`{name}` cannot be used together with `{_SWITCH}`", name)
