"""From a prepared request to the engine: its messages, the group that waits for outputs, the state of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.http import ApiError, context_length_exceeded, invalid, unavailable
from moeserve.frontend.keys import Identity, cache_namespace
from moeserve.frontend.prepare.messages import Prepared
from moeserve.frontend.relay.answer import Answer, build_generates
from moeserve.frontend.relay.request_group import EngineGone, Past, RequestGroup, RequestRejected
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.text import prompt_tail
from moeserve.plan import Terms
from moeserve.thoughts import ThoughtBudget
from moeserve.wire import Generate, Rejected


def generates_of(
    services: Services,
    prepared: Prepared,
    facts: ModelFacts,
    *,
    answer_id: str,
    identity: Identity,
    seed: int,
    terms: Terms,
    arrived_at: float | None = None,
    session: str = "",
) -> list[Generate]:
    """Return one message per choice; the same ones for the same arguments. Raises ApiError if a prompt does not fit."""
    request = prepared.request
    return build_generates(
        request,
        prepared.prompts,
        request_id=answer_id,
        namespace=cache_namespace(services.run.secret, identity, request.cache_salt),
        seed=seed,
        max_model_len=facts.max_model_len,
        wishes=prepared.wishes,
        terms=terms,
        arrived_at=arrived_at,
        thoughts=thought_budgets(services, prepared),
        session=session,
        prediction=prepared.prediction,
    )


def answer_of(services: Services, prepared: Prepared, answer_id: str) -> Answer:
    """Return the state of an answer that has not begun."""
    return Answer(
        prepared.request,
        prepared.prompts,
        services.tokenizer,
        services.shape,
        prepared.prompt_texts,
        thoughts=services.thoughts,
        answer_id=answer_id,
    )


def thought_budgets(services: Services, prepared: Prepared) -> list[ThoughtBudget | None]:
    """Return the bounds for the thoughts of the answers to each prompt. Raises ApiError."""
    request, shape = prepared.request, services.shape
    if not shape.thinks(request):
        return [None] * len(prepared.prompts)
    budgets = []
    for number, prompt in enumerate(prepared.prompts):
        start = shape.start_of(request, prompt_tail(services.tokenizer, prompt), number)
        budgets.append(services.thoughts.budget(request, start))
    if request.beams is not None and any(budget is not None for budget in budgets):
        raise invalid("A budget of thought cannot be used together with `use_beam_search`", "use_beam_search")
    return budgets


@asynccontextmanager
async def submitted(
    services: Services, generates: list[Generate], facts: ModelFacts, past: Past | None = None
) -> AsyncIterator[RequestGroup]:
    """Send requests to the engine and wait until it has admitted all of them. Leaving the block aborts them.

    past: they go on from there. Raises ApiError.
    """
    async with AsyncExitStack() as stack:
        try:
            group = await stack.enter_async_context(services.engine.submit(generates, past))
            await group.admitted()
        except EngineGone as error:
            raise engine_unavailable(error) from error
        except RequestRejected as error:
            raise _rejection(services, error.rejected, generates, facts) from None
        yield group


def _rejection(services: Services, rejected: Rejected, generates: list[Generate], facts: ModelFacts) -> ApiError:
    admission, terms, wait_s = services.admission, generates[0].terms, rejected.retry_after_s
    match rejected.code:
        case "queue_full":
            return admission.full(terms, wait_s)
        case "overloaded":
            return admission.late(terms, wait_s)
        case "draining":
            return unavailable("The server is shutting down", "draining", wait_s or 1.0, close=True)
        case "context_length_exceeded":
            index = next(i for i, generate in enumerate(generates) if generate.request_id == rejected.request_id)
            tokens = len(generates[index].token_ids) // 4
            return context_length_exceeded(facts.max_model_len, tokens, generates[index].sampling.max_tokens)
        case _:
            return invalid(rejected.reason[:500])
