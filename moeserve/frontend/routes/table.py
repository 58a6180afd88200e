"""All routes. A new one is one record here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from moeserve.frontend.dialects import messages
from moeserve.frontend.dialects.chat import (
    MESSAGE_FIELDS,
    PIN_FIELDS,
    WARM_FIELDS,
    ChatBody,
    DetokenizeBody,
    PrefixBody,
    TokenizeBody,
    UnpinBody,
)
from moeserve.frontend.dialects.completions import CompletionBody
from moeserve.frontend.dialects.messages import MessagesBody
from moeserve.frontend.dialects.responses import ConversationBody, ItemsBody, MetadataBody, ResponsesBody
from moeserve.frontend.pages import FILES, Pages
from moeserve.frontend.route import BYTES, EVENTS, HTML, JSON, TEXT, Route
from moeserve.frontend.routes.batches import BatchBody, BatchRoutes, FileRoutes
from moeserve.frontend.routes.cache import CacheRoutes
from moeserve.frontend.routes.generate import GenerateRoute
from moeserve.frontend.routes.openapi import DescriptionRoutes
from moeserve.frontend.routes.responses import ConversationRoutes, KeptResponseRoutes, ResponsesRoute
from moeserve.frontend.routes.service import (
    ExpertRoutes,
    LiveRoutes,
    RenderRoute,
    ReplicaRoutes,
    ServiceRoutes,
    SleepRoutes,
    TokenRoutes,
    TraceBody,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The objects of one application that answer."""

    chat: GenerateRoute
    completions: GenerateRoute
    messages: GenerateRoute
    responses: ResponsesRoute
    warm: GenerateRoute
    kept: KeptResponseRoutes
    conversations: ConversationRoutes
    files: FileRoutes
    batches: BatchRoutes
    tokens: TokenRoutes
    render_chat: RenderRoute
    render_completions: RenderRoute
    replica: ReplicaRoutes
    service: ServiceRoutes
    sleep: SleepRoutes
    cache: CacheRoutes
    experts: ExpertRoutes
    live: LiveRoutes
    description: DescriptionRoutes
    pages: Pages


# Endpoints of a batch's lines, by their paths.
BATCH_ROUTES: dict[str, Callable[[Endpoints], ASGIApp]] = {
    "/v1/chat/completions": lambda made: made.chat,
    "/v1/completions": lambda made: made.completions,
    "/v1/responses": lambda made: made.responses,
}
_HELLO = [{"role": "user", "content": "Hello"}]
_PREFIX = MESSAGE_FIELDS | {"prompt"}
ROUTES: tuple[Route[Endpoints], ...] = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        role="user",
        summary="Answer a chat",
        endpoint=lambda made: made.chat,
        body=ChatBody,
        required=("model", "messages"),
        example={"messages": _HELLO, "max_completion_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        method="POST",
        path="/v1/completions",
        role="user",
        summary="Continue a text",
        endpoint=lambda made: made.completions,
        body=CompletionBody,
        required=("model", "prompt"),
        example={"prompt": "Once upon a time", "max_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        method="POST",
        path="/v1/responses",
        role="user",
        summary="Make a response",
        endpoint=lambda made: made.responses,
        body=ResponsesBody,
        required=("model", "input"),
        example={"input": "Hello", "max_output_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        method="GET",
        path="/v1/responses/resp_{name}",
        role="user",
        summary="Find a response, or take up its events again",
        endpoint=lambda made: made.kept.one,
        media=(JSON, EVENTS),
    ),
    Route(
        method="DELETE",
        path="/v1/responses/resp_{name}",
        role="user",
        summary="Drop a response",
        endpoint=lambda made: made.kept.one,
    ),
    Route(
        method="POST",
        path="/v1/responses/resp_{name}/cancel",
        role="user",
        summary="Cancel a response in the background",
        endpoint=lambda made: made.kept.cancel,
    ),
    Route(
        method="GET",
        path="/v1/responses/resp_{name}/input_items",
        role="user",
        summary="List the input of a response",
        endpoint=lambda made: made.kept.input_items,
    ),
    Route(
        method="POST",
        path="/v1/conversations",
        role="user",
        summary="Make a conversation",
        endpoint=lambda made: made.conversations.create,
        body=ConversationBody,
        example={"items": _HELLO},
    ),
    Route(
        method="GET",
        path="/v1/conversations/conv_{name}",
        role="user",
        summary="Find a conversation",
        endpoint=lambda made: made.conversations.one,
    ),
    Route(
        method="POST",
        path="/v1/conversations/conv_{name}",
        role="user",
        summary="Give a conversation other metadata",
        endpoint=lambda made: made.conversations.one,
        body=MetadataBody,
        required=("metadata",),
        example={"metadata": {"topic": "weather"}},
    ),
    Route(
        method="DELETE",
        path="/v1/conversations/conv_{name}",
        role="user",
        summary="Drop a conversation",
        endpoint=lambda made: made.conversations.one,
    ),
    Route(
        method="GET",
        path="/v1/conversations/conv_{name}/items",
        role="user",
        summary="List the items of a conversation",
        endpoint=lambda made: made.conversations.items,
    ),
    Route(
        method="POST",
        path="/v1/conversations/conv_{name}/items",
        role="user",
        summary="Add items to a conversation",
        endpoint=lambda made: made.conversations.items,
        body=ItemsBody,
        required=("items",),
        example={"items": _HELLO},
    ),
    Route(
        method="GET",
        path="/v1/conversations/conv_{name}/items/{item}",
        role="user",
        summary="Find an item of a conversation",
        endpoint=lambda made: made.conversations.item,
    ),
    Route(
        method="DELETE",
        path="/v1/conversations/conv_{name}/items/{item}",
        role="user",
        summary="Take an item out of a conversation",
        endpoint=lambda made: made.conversations.item,
    ),
    Route(
        method="POST",
        path="/v1/files",
        role="user",
        summary="Upload a file of requests",
        endpoint=lambda made: made.files.all,
    ),
    Route(
        method="GET",
        path="/v1/files",
        role="user",
        summary="List one's files",
        endpoint=lambda made: made.files.all,
    ),
    Route(
        method="GET",
        path="/v1/files/file-{name}",
        role="user",
        summary="Describe a file",
        endpoint=lambda made: made.files.one,
    ),
    Route(
        method="DELETE",
        path="/v1/files/file-{name}",
        role="user",
        summary="Drop a file",
        endpoint=lambda made: made.files.one,
    ),
    Route(
        method="GET",
        path="/v1/files/file-{name}/content",
        role="user",
        summary="Download a file",
        endpoint=lambda made: made.files.content,
        media=(BYTES,),
    ),
    Route(
        method="POST",
        path="/v1/batches",
        role="user",
        summary="Have the requests of a file answered",
        endpoint=lambda made: made.batches.all,
        body=BatchBody,
        required=("input_file_id", "endpoint", "completion_window"),
        example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    Route(
        method="GET",
        path="/v1/batches",
        role="user",
        summary="List one's batches",
        endpoint=lambda made: made.batches.all,
    ),
    Route(
        method="GET",
        path="/v1/batches/batch_{name}",
        role="user",
        summary="Describe a batch",
        endpoint=lambda made: made.batches.one,
    ),
    Route(
        method="POST",
        path="/v1/batches/batch_{name}/cancel",
        role="user",
        summary="Cancel a batch",
        endpoint=lambda made: made.batches.cancel,
    ),
    Route(
        method="POST",
        path="/v1/messages",
        role="user",
        summary="Answer messages",
        endpoint=lambda made: made.messages,
        error_body=messages.error_body,
        body=MessagesBody,
        required=("model", "messages", "max_tokens"),
        example={"messages": _HELLO, "max_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        role="user",
        summary="Count the tokens",
        endpoint=lambda made: made.tokens.count_message,
        error_body=messages.error_body,
        body=MessagesBody,
        required=("model", "messages"),
        example={"messages": _HELLO},
    ),
    Route(
        method="POST",
        path="/v1/chat/completions/render",
        role="user",
        summary="Tell the tokens that a chat has",
        endpoint=lambda made: made.render_chat,
        body=ChatBody,
        required=("model", "messages"),
        example={"messages": _HELLO},
    ),
    Route(
        method="POST",
        path="/v1/completions/render",
        role="user",
        summary="Tell the tokens that prompts have",
        endpoint=lambda made: made.render_completions,
        body=CompletionBody,
        required=("model", "prompt"),
        example={"prompt": "Once upon a time"},
    ),
    Route(
        method="GET",
        path="/v1/models",
        role="user",
        summary="List the models that are served",
        endpoint=lambda made: made.service.models,
    ),
    Route(
        method="GET",
        path="/v1/models/{name:path}",
        role="user",
        summary="Describe a model",
        endpoint=lambda made: made.service.model,
    ),
    Route(
        method="POST",
        path="/tokenize",
        role="user",
        summary="Turn a text or messages into tokens",
        endpoint=lambda made: made.tokens.tokenize,
        body=TokenizeBody,
        fields=_PREFIX | {"model", "add_special_tokens"},
        example={"prompt": "Hello"},
    ),
    Route(
        method="POST",
        path="/detokenize",
        role="user",
        summary="Turn tokens into text",
        endpoint=lambda made: made.tokens.detokenize,
        body=DetokenizeBody,
        required=("tokens",),
        example={"tokens": [1, 2]},
    ),
    Route(
        method="GET",
        path="/health",
        role="public",
        summary="Tell whether the HTTP process lives",
        endpoint=lambda made: made.service.health,
        is_watch=True,
    ),
    Route(
        method="GET",
        path="/ready",
        role="public",
        summary="Tell whether requests are admitted",
        endpoint=lambda made: made.service.ready,
        is_watch=True,
    ),
    Route(
        method="GET",
        path="/metrics",
        role="metrics",
        summary="Tell the metrics in Prometheus' form",
        endpoint=lambda made: made.service.metrics,
        media=(TEXT,),
        is_watch=True,
    ),
    Route(
        method="GET",
        path="/version",
        role="user",
        summary="Tell the version",
        endpoint=lambda made: made.service.version,
    ),
    Route(
        method="GET",
        path="/kv_event_sources",
        role="user",
        summary="Tell where events about cached KV blocks are published",
        endpoint=lambda made: made.replica.kv_event_sources,
    ),
    *(
        Route(
            method="GET",
            path=path,
            role="user",
            summary="Describe the service to routers",
            endpoint=lambda made: made.replica.server_info,
        )
        for path in ("/get_server_info", "/server_info")
    ),
    *(
        Route(
            method="GET",
            path=path,
            role="user",
            summary="Describe the model to routers",
            endpoint=lambda made: made.replica.model_info,
        )
        for path in ("/get_model_info", "/model_info")
    ),
    Route(
        method="GET",
        path="/v1/loads",
        role="metrics",
        summary="Tell the load to routers",
        endpoint=lambda made: made.replica.loads,
    ),
    Route(
        method="POST",
        path="/reset_prefix_cache",
        role="admin",
        summary="Forget all cached prefixes",
        endpoint=lambda made: made.service.reset_prefix_cache,
    ),
    Route(
        method="POST",
        path="/sleep",
        role="admin",
        summary="Take weights and KV out of memory until a request comes",
        endpoint=lambda made: made.sleep.sleep,
    ),
    Route(
        method="POST",
        path="/wake_up",
        role="admin",
        summary="Load the model again after a sleep",
        endpoint=lambda made: made.sleep.wake_up,
    ),
    Route(
        method="GET",
        path="/is_sleeping",
        role="admin",
        summary="Tell whether the service sleeps",
        endpoint=lambda made: made.sleep.is_sleeping,
    ),
    Route(
        method="GET",
        path="/v1/cache",
        role="user",
        summary="List one's cached prefixes",
        endpoint=lambda made: made.cache.cache,
    ),
    Route(
        method="DELETE",
        path="/v1/cache",
        role="user",
        summary="Forget one's cached prefixes",
        endpoint=lambda made: made.cache.cache,
    ),
    Route(
        method="POST",
        path="/v1/cache/warm",
        role="user",
        summary="Compute and cache a prompt",
        endpoint=lambda made: made.warm,
        body=PrefixBody,
        fields=_PREFIX | WARM_FIELDS,
        example={"prompt": "Hello"},
    ),
    Route(
        method="POST",
        path="/v1/cache/pin",
        role="user",
        summary="Keep a prefix until it is unpinned",
        endpoint=lambda made: made.cache.pin,
        body=PrefixBody,
        fields=_PREFIX | PIN_FIELDS,
        example={"prompt": "Hello"},
    ),
    Route(
        method="POST",
        path="/v1/cache/unpin",
        role="user",
        summary="Let a pinned prefix go",
        endpoint=lambda made: made.cache.unpin,
        body=UnpinBody,
        fields=_PREFIX | PIN_FIELDS | {"id"},
        example={"prompt": "Hello"},
    ),
    Route(
        method="GET",
        path="/v1/stats",
        role="metrics",
        summary="Tell the figures of the latest minutes",
        endpoint=lambda made: made.live.stats,
    ),
    Route(
        method="GET",
        path="/v1/stats/stream",
        role="metrics",
        summary="Tell the figures every second",
        endpoint=lambda made: made.live.stream,
        media=(EVENTS,),
    ),
    Route(
        method="GET",
        path="/v1/experts",
        role="admin",
        summary="Describe load, balance and placement of the experts",
        endpoint=lambda made: made.experts.experts,
    ),
    Route(
        method="POST",
        path="/v1/experts/statistics",
        role="admin",
        summary="Save the statistics of the experts",
        endpoint=lambda made: made.experts.save_statistics,
    ),
    Route(
        method="POST",
        path="/v1/experts/trace",
        role="admin",
        summary="Record a routing trace",
        endpoint=lambda made: made.experts.trace,
        body=TraceBody,
        required=("action",),
        media=(JSON, BYTES),
    ),
    Route(
        method="GET",
        path="/dashboard",
        role="public",
        summary="Show the figures as a page",
        endpoint=lambda made: made.pages.file,
        media=(HTML,),
    ),
    Route(
        method="GET",
        path="/openapi.json",
        role="public",
        summary="Describe these routes",
        endpoint=lambda made: made.description.openapi,
    ),
    Route(
        method="GET",
        path="/",
        role="public",
        summary="List the routes; show the chat page to browsers",
        endpoint=lambda made: made.pages.index(made.description.index),
        media=(JSON, HTML),
    ),
    *(
        Route(
            method="GET",
            path=path,
            role="public",
            summary="A file of a page",
            endpoint=lambda made: made.pages.file,
            is_file=True,
        )
        for path in FILES
        if path.startswith("/pages/")
    ),
)
