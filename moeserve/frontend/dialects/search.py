"""The fields that chat and completions have beside all other dialects: beam search, transfer of KV, a prediction."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from moeserve.frontend import limits
from moeserve.frontend.dialects.chat_parts import Prediction, read_prediction
from moeserve.frontend.dialects.fields import Choices, SamplingBody, Share, read_request
from moeserve.frontend.dialects.formats import read_format
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, ModelFacts
from moeserve.frontend.errors import ApiError, invalid
from moeserve.kv_transfer import KvTicket, read_params
from moeserve.plan import BeamParams, SamplingParams

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
    best_of: Choices | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-limits.MAX_LENGTH_PENALTY, le=limits.MAX_LENGTH_PENALTY)] | None = None
    early_stopping: bool | str | None = None
    echo: bool | None = None
    cache_hit_threshold: Share | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prediction: Prediction | None = None


def read_search_request(
    body: SearchBody,
    model: ModelFacts,
    prompts: list[ChatPrompt | str | list[int]],
    max_tokens: int | None,
    sampling: SamplingParams,
    *,
    ignored: tuple[str, ...],
    beams: BeamParams | None,
    n: int,
    **own: Any,
) -> GenerateRequest:
    """Return the request of a body; see `read_request`. Raises ApiError.

    ignored: fields that no dialect reads. beams: of `read_beams`. n: samples of each prompt.
    """
    is_single = n * len(prompts) == 1 and beams is None
    offers_kv, ticket = _transfer(body.kv_transfer_params, model, is_single=is_single, stream=bool(body.stream))
    shared = {
        "n": n,
        "beams": beams,
        "echo": bool(body.echo),
        "offers_kv": offers_kv,
        "ticket": ticket,
        "cache_hit_threshold": body.cache_hit_threshold or 0.0,
        "prediction": read_prediction(body.prediction),
        "output_format": read_format(body),
        "ignored": (*ignored, *_without_search(body)),
    }
    return read_request(body, model, prompts, max_tokens, sampling, **(shared | own))


def _transfer(
    params: dict[str, Any] | None, model: ModelFacts, *, is_single: bool, stream: bool
) -> tuple[bool, KvTicket | None]:
    """Return the wishes in `kv_transfer_params` (see `read_params`). Raises ApiError.

    is_single: the request has one prompt and one choice.
    """
    name = "kv_transfer_params"
    if params is None:
        return False, None
    try:
        offers, ticket = read_params(params)
    except ValueError as error:
        raise invalid(str(error), name) from None
    if (offers or ticket is not None) and not model.moves_kv:
        raise invalid(f"`{name}` needs a server that was started with --kv-transfer-config", name)
    if offers and (stream or not is_single):
        raise invalid("`do_remote_decode` takes one prompt and one choice, and is not streamed", name)
    return offers, ticket


def read_beams(body: SearchBody, logprobs: int | None) -> BeamParams | None:
    """Return the search that a body asks for, None for none. Raises ApiError.

    logprobs: alternatives to each token of the answer, None for none.
    """
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    early = body.early_stopping or False
    if isinstance(early, str) and early != "never":
        raise invalid('`early_stopping` must be true, false or "never"', "early_stopping")
    if not body.use_beam_search:
        return None
    n = body.n or 1
    width = n if body.best_of is None else body.best_of
    if not max(2, n) <= width <= limits.MAX_N:
        field = "n" if body.best_of is None else "best_of"
        raise invalid(f"`{field}` is the number of beams: at least 2, at least `n`, at most {limits.MAX_N}", field)
    for name, values in _REFUSED.items():
        if getattr(body, name) not in values:
            raise _apart(name)
    if body.cache_hit_threshold:
        raise _apart("cache_hit_threshold")
    if body.prompt_logprobs is not None and body.prompt_logprobs is not False:
        raise _apart("prompt_logprobs")
    if body.max_tokens == 0:
        raise _apart("max_tokens")
    return BeamParams(width, n, float(penalty), "never" if early == "never" else bool(early), logprobs)


def _without_search(body: SearchBody) -> tuple[str, ...]:
    """Return the fields of searches in a body that asks for none."""
    return () if body.use_beam_search else tuple(name for name in _OF_SEARCHES if getattr(body, name) is not None)


def _apart(name: str) -> ApiError:
    return invalid(f"`{name}` cannot be used together with `{_SWITCH}`", name)
