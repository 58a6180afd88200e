"""All routes. A new one is one record here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

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
from moeserve.frontend.dialects.messages import MessagesBody, error_body
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
    "/v1/chat/completions": lambda e: e.chat,
    "/v1/completions": lambda e: e.completions,
    "/v1/responses": lambda e: e.responses,
}
_HELLO = [{"role": "user", "content": "Hello"}]
_PREFIX = MESSAGE_FIELDS | {"prompt"}
ROUTES: tuple[Route[Endpoints], ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        "user",
        "Answer a chat",
        lambda e: e.chat,
        body=ChatBody,
        required=("model", "messages"),
        example={"messages": _HELLO, "max_completion_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        "POST",
        "/v1/completions",
        "user",
        "Continue a text",
        lambda e: e.completions,
        body=CompletionBody,
        required=("model", "prompt"),
        example={"prompt": "Once upon a time", "max_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        "POST",
        "/v1/responses",
        "user",
        "Make a response",
        lambda e: e.responses,
        body=ResponsesBody,
        required=("model", "input"),
        example={"input": "Hello", "max_output_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        "GET",
        "/v1/responses/resp_{name}",
        "user",
        "Find a response, or take up its events again",
        lambda e: e.kept.one,
        media=(JSON, EVENTS),
    ),
    Route("DELETE", "/v1/responses/resp_{name}", "user", "Drop a response", lambda e: e.kept.one),
    Route(
        "POST",
        "/v1/responses/resp_{name}/cancel",
        "user",
        "Cancel a response in the background",
        lambda e: e.kept.cancel,
    ),
    Route(
        "GET",
        "/v1/responses/resp_{name}/input_items",
        "user",
        "List the input of a response",
        lambda e: e.kept.input_items,
    ),
    Route(
        "POST",
        "/v1/conversations",
        "user",
        "Make a conversation",
        lambda e: e.conversations.create,
        body=ConversationBody,
        example={"items": _HELLO},
    ),
    Route("GET", "/v1/conversations/conv_{name}", "user", "Find a conversation", lambda e: e.conversations.one),
    Route(
        "POST",
        "/v1/conversations/conv_{name}",
        "user",
        "Give a conversation other metadata",
        lambda e: e.conversations.one,
        body=MetadataBody,
        required=("metadata",),
        example={"metadata": {"topic": "weather"}},
    ),
    Route("DELETE", "/v1/conversations/conv_{name}", "user", "Drop a conversation", lambda e: e.conversations.one),
    Route(
        "GET",
        "/v1/conversations/conv_{name}/items",
        "user",
        "List the items of a conversation",
        lambda e: e.conversations.items,
    ),
    Route(
        "POST",
        "/v1/conversations/conv_{name}/items",
        "user",
        "Add items to a conversation",
        lambda e: e.conversations.items,
        body=ItemsBody,
        required=("items",),
        example={"items": _HELLO},
    ),
    Route(
        "GET",
        "/v1/conversations/conv_{name}/items/{item}",
        "user",
        "Find an item of a conversation",
        lambda e: e.conversations.item,
    ),
    Route(
        "DELETE",
        "/v1/conversations/conv_{name}/items/{item}",
        "user",
        "Take an item out of a conversation",
        lambda e: e.conversations.item,
    ),
    Route("POST", "/v1/files", "user", "Upload a file of requests", lambda e: e.files.all),
    Route("GET", "/v1/files", "user", "List one's files", lambda e: e.files.all),
    Route("GET", "/v1/files/file-{name}", "user", "Describe a file", lambda e: e.files.one),
    Route("DELETE", "/v1/files/file-{name}", "user", "Drop a file", lambda e: e.files.one),
    Route("GET", "/v1/files/file-{name}/content", "user", "Download a file", lambda e: e.files.content, media=(BYTES,)),
    Route(
        "POST",
        "/v1/batches",
        "user",
        "Have the requests of a file answered",
        lambda e: e.batches.all,
        body=BatchBody,
        required=("input_file_id", "endpoint", "completion_window"),
        example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    Route("GET", "/v1/batches", "user", "List one's batches", lambda e: e.batches.all),
    Route("GET", "/v1/batches/batch_{name}", "user", "Describe a batch", lambda e: e.batches.one),
    Route("POST", "/v1/batches/batch_{name}/cancel", "user", "Cancel a batch", lambda e: e.batches.cancel),
    Route(
        "POST",
        "/v1/messages",
        "user",
        "Answer messages",
        lambda e: e.messages,
        error_body=error_body,
        body=MessagesBody,
        required=("model", "messages", "max_tokens"),
        example={"messages": _HELLO, "max_tokens": 16},
        media=(JSON, EVENTS),
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "user",
        "Count the tokens",
        lambda e: e.tokens.count_message,
        error_body=error_body,
        body=MessagesBody,
        required=("model", "messages"),
        example={"messages": _HELLO},
    ),
    Route(
        "POST",
        "/v1/chat/completions/render",
        "user",
        "Tell the tokens that a chat has",
        lambda e: e.render_chat,
        body=ChatBody,
        required=("model", "messages"),
        example={"messages": _HELLO},
    ),
    Route(
        "POST",
        "/v1/completions/render",
        "user",
        "Tell the tokens that prompts have",
        lambda e: e.render_completions,
        body=CompletionBody,
        required=("model", "prompt"),
        example={"prompt": "Once upon a time"},
    ),
    Route("GET", "/v1/models", "user", "List the models that are served", lambda e: e.service.models),
    Route("GET", "/v1/models/{name:path}", "user", "Describe a model", lambda e: e.service.model),
    Route(
        "POST",
        "/tokenize",
        "user",
        "Turn a text or messages into tokens",
        lambda e: e.tokens.tokenize,
        body=TokenizeBody,
        fields=_PREFIX | {"model", "add_special_tokens"},
        example={"prompt": "Hello"},
    ),
    Route(
        "POST",
        "/detokenize",
        "user",
        "Turn tokens into text",
        lambda e: e.tokens.detokenize,
        body=DetokenizeBody,
        required=("tokens",),
        example={"tokens": [1, 2]},
    ),
    Route("GET", "/health", "public", "Tell whether the HTTP process lives", lambda e: e.service.health, is_watch=True),
    Route("GET", "/ready", "public", "Tell whether requests are admitted", lambda e: e.service.ready, is_watch=True),
    Route(
        "GET",
        "/metrics",
        "metrics",
        "Tell the metrics in Prometheus' form",
        lambda e: e.service.metrics,
        media=(TEXT,),
        is_watch=True,
    ),
    Route("GET", "/version", "user", "Tell the version", lambda e: e.service.version),
    Route(
        "GET",
        "/kv_event_sources",
        "user",
        "Tell where events about cached KV blocks are published",
        lambda e: e.replica.kv_event_sources,
    ),
    *(
        Route("GET", path, "user", "Describe the service to routers", lambda e: e.replica.server_info)
        for path in ("/get_server_info", "/server_info")
    ),
    *(
        Route("GET", path, "user", "Describe the model to routers", lambda e: e.replica.model_info)
        for path in ("/get_model_info", "/model_info")
    ),
    Route("GET", "/v1/loads", "metrics", "Tell the load to routers", lambda e: e.replica.loads),
    Route("POST", "/reset_prefix_cache", "admin", "Forget all cached prefixes", lambda e: e.service.reset_prefix_cache),
    Route(
        "POST", "/sleep", "admin", "Take weights and KV out of memory until a request comes", lambda e: e.sleep.sleep
    ),
    Route("POST", "/wake_up", "admin", "Load the model again after a sleep", lambda e: e.sleep.wake_up),
    Route("GET", "/is_sleeping", "admin", "Tell whether the service sleeps", lambda e: e.sleep.is_sleeping),
    Route("GET", "/v1/cache", "user", "List one's cached prefixes", lambda e: e.cache.cache),
    Route("DELETE", "/v1/cache", "user", "Forget one's cached prefixes", lambda e: e.cache.cache),
    Route(
        "POST",
        "/v1/cache/warm",
        "user",
        "Compute and cache a prompt",
        lambda e: e.warm,
        body=PrefixBody,
        fields=_PREFIX | WARM_FIELDS,
        example={"prompt": "Hello"},
    ),
    Route(
        "POST",
        "/v1/cache/pin",
        "user",
        "Keep a prefix until it is unpinned",
        lambda e: e.cache.pin,
        body=PrefixBody,
        fields=_PREFIX | PIN_FIELDS,
        example={"prompt": "Hello"},
    ),
    Route(
        "POST",
        "/v1/cache/unpin",
        "user",
        "Let a pinned prefix go",
        lambda e: e.cache.unpin,
        body=UnpinBody,
        fields=_PREFIX | PIN_FIELDS | {"id"},
        example={"prompt": "Hello"},
    ),
    Route("GET", "/v1/stats", "metrics", "Tell the figures of the latest minutes", lambda e: e.live.stats),
    Route(
        "GET", "/v1/stats/stream", "metrics", "Tell the figures every second", lambda e: e.live.stream, media=(EVENTS,)
    ),
    Route(
        "GET",
        "/v1/experts",
        "admin",
        "Describe load, balance and placement of the experts",
        lambda e: e.experts.experts,
    ),
    Route(
        "POST",
        "/v1/experts/statistics",
        "admin",
        "Save the statistics of the experts",
        lambda e: e.experts.save_statistics,
    ),
    Route(
        "POST",
        "/v1/experts/trace",
        "admin",
        "Record a routing trace",
        lambda e: e.experts.trace,
        body=TraceBody,
        required=("action",),
        media=(JSON, BYTES),
    ),
    Route("GET", "/dashboard", "public", "Show the figures as a page", lambda e: e.pages.file, media=(HTML,)),
    Route("GET", "/openapi.json", "public", "Describe these routes", lambda e: e.description.openapi),
    Route(
        "GET",
        "/",
        "public",
        "List the routes; show the chat page to browsers",
        lambda e: e.pages.index(e.description.index),
        media=(JSON, HTML),
    ),
    *(
        Route("GET", path, "public", "A file of a page", lambda e: e.pages.file, is_file=True)
        for path in FILES
        if path.startswith("/pages/")
    ),
)
