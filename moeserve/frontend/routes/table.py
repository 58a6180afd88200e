"""All routes. A new one is one record here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from moeserve.frontend.dialects.chat import (
    MESSAGE_FIELDS,
    PIN_FIELDS,
    WARM_FIELDS,
    ChatBody,
    DetokenizeBody,
    PinBody,
    PrefixBody,
    TokenizeBody,
)
from moeserve.frontend.dialects.completions import CompletionBody
from moeserve.frontend.dialects.messages import MessagesBody, error_body
from moeserve.frontend.dialects.ollama import OllamaChatBody, OllamaGenerateBody
from moeserve.frontend.dialects.ollama import error_body as ollama_error_body
from moeserve.frontend.dialects.ollama_models import NameBody
from moeserve.frontend.dialects.responses import ConversationBody, ItemsBody, MetadataBody, ResponsesBody
from moeserve.frontend.dialects.tgi import TgiBody, TritonBody, tgi_error, triton_error
from moeserve.frontend.jobs.idempotency import KeyedAnswers
from moeserve.frontend.jobs.jobs import Jobs
from moeserve.frontend.pages import FILES, Pages
from moeserve.frontend.route import BYTES, EVENTS, HTML, JSON, LINES, ROLES, TEXT, Role, Route
from moeserve.frontend.routes.batches import BatchBody, BatchRoutes
from moeserve.frontend.routes.cache import CacheRoutes
from moeserve.frontend.routes.files import FileRoutes
from moeserve.frontend.routes.generate import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    TGI,
    TGI_STREAM,
    TRITON,
    TRITON_STREAM,
    WARM,
    GenerateRoute,
)
from moeserve.frontend.routes.ollama import OllamaGenerateRoute, OllamaRoutes
from moeserve.frontend.routes.openapi import DescriptionRoutes
from moeserve.frontend.routes.requests import OpenRequestRoutes
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
from moeserve.frontend.routes.triton import TritonGenerateRoute, TritonRoutes
from moeserve.frontend.routes.usage import UsageRoutes
from moeserve.frontend.services import Services
from moeserve.frontend.store.store import Store
from moeserve.frontend.usage import UsageBook


class Endpoints:
    """The objects of one application that answer."""

    def __init__(
        self, services: Services, store: Store, jobs: Jobs, answers: KeyedAnswers, book: UsageBook, owner: str
    ) -> None:
        """owner: the name of this process, which works on the batches that are made here."""
        self.chat = GenerateRoute(services, CHAT, jobs, answers, book)
        self.completions = GenerateRoute(services, COMPLETIONS, jobs, answers, book)
        self.messages = GenerateRoute(services, MESSAGES, jobs, answers, book)
        self.responses = ResponsesRoute(services, store, jobs, answers, book)
        self.warm = GenerateRoute(services, WARM, jobs, answers, book)
        self.kept = KeptResponseRoutes(services, store, jobs)
        self.conversations = ConversationRoutes(services, store)
        self.files = FileRoutes(store)
        self.batches = BatchRoutes(store, book, owner)
        self.tokens = TokenRoutes(services)
        self.render_chat = RenderRoute(services, "chat")
        self.render_completions = RenderRoute(services, "completions")
        self.replica = ReplicaRoutes(services)
        self.service = ServiceRoutes(services, book)
        self.sleep = SleepRoutes(services)
        self.cache = CacheRoutes(services)
        self.experts = ExpertRoutes(services)
        self.live = LiveRoutes(services, book)
        self.usage = UsageRoutes(services, book)
        self.open_requests = OpenRequestRoutes(services, book)
        self.description = DescriptionRoutes(services, ROUTES)
        self.pages = Pages()
        generate = partial(GenerateRoute, services, jobs=jobs, answers=answers, book=book)
        self.tgi, self.tgi_stream = generate(TGI), generate(TGI_STREAM)
        self.triton = TritonRoutes(services)
        self.triton_generate = TritonGenerateRoute(services, generate(TRITON))
        self.triton_stream = TritonGenerateRoute(services, generate(TRITON_STREAM))
        self.ollama = OllamaRoutes(services)
        self.ollama_chat = OllamaGenerateRoute(services, jobs, answers, book, OllamaChatBody)
        self.ollama_generate = OllamaGenerateRoute(services, jobs, answers, book, OllamaGenerateBody)


def _route(role: Role, call: str, summary: str, endpoint: Callable[[Endpoints], Any], **facts: Any) -> Route[Endpoints]:
    """Return a route. call: `METHOD PATH`. facts: the other fields of `Route`."""
    method, path = call.split()
    return Route(method, path, role, summary, endpoint, **facts)


_public, _user, _metrics, _admin = (partial(_route, role) for role in ROLES)

_ollama = partial(_user, error_body=ollama_error_body)
_tgi = partial(_user, error_body=tgi_error)
_triton = partial(_user, error_body=triton_error)

_START = "Once upon a time"
_tgi_text = partial(_tgi, body=TgiBody, required=("inputs",), example={"inputs": _START})
_triton_text = partial(_triton, body=TritonBody, required=("text_input",), example={"text_input": _START})
_HELLO = [{"role": "user", "content": "Hello"}]
_PREFIX = MESSAGE_FIELDS | {"prompt"}
ROUTES: tuple[Route[Endpoints], ...] = (
    _user(
        "POST /v1/chat/completions",
        "Answer a chat",
        lambda e: e.chat,
        body=ChatBody,
        required=("messages",),
        example={"messages": _HELLO, "max_completion_tokens": 16},
        media=(JSON, EVENTS),
    ),
    _user(
        "POST /v1/completions",
        "Continue a text",
        lambda e: e.completions,
        body=CompletionBody,
        required=("prompt",),
        example={"prompt": _START, "max_tokens": 16},
        media=(JSON, EVENTS),
    ),
    _user(
        "POST /v1/responses",
        "Make a response",
        lambda e: e.responses,
        body=ResponsesBody,
        required=("input",),
        example={"input": "Hello", "max_output_tokens": 16},
        media=(JSON, EVENTS),
    ),
    _user(
        "GET /v1/responses/resp_{name}",
        "Find a response, or take up its events again",
        lambda e: e.kept.one,
        media=(JSON, EVENTS),
    ),
    _user("DELETE /v1/responses/resp_{name}", "Drop a response", lambda e: e.kept.one),
    _user("POST /v1/responses/resp_{name}/cancel", "Cancel a response in the background", lambda e: e.kept.cancel),
    _user("GET /v1/responses/resp_{name}/input_items", "List the input of a response", lambda e: e.kept.input_items),
    _user(
        "POST /v1/conversations",
        "Make a conversation",
        lambda e: e.conversations.create,
        body=ConversationBody,
        example={"items": _HELLO},
    ),
    _user("GET /v1/conversations/conv_{name}", "Find a conversation", lambda e: e.conversations.one),
    _user(
        "POST /v1/conversations/conv_{name}",
        "Give a conversation other metadata",
        lambda e: e.conversations.one,
        body=MetadataBody,
        required=("metadata",),
        example={"metadata": {"topic": "weather"}},
    ),
    _user("DELETE /v1/conversations/conv_{name}", "Drop a conversation", lambda e: e.conversations.one),
    _user(
        "GET /v1/conversations/conv_{name}/items", "List the items of a conversation", lambda e: e.conversations.items
    ),
    _user(
        "POST /v1/conversations/conv_{name}/items",
        "Add items to a conversation",
        lambda e: e.conversations.items,
        body=ItemsBody,
        required=("items",),
        example={"items": _HELLO},
    ),
    _user(
        "GET /v1/conversations/conv_{name}/items/{item}",
        "Find an item of a conversation",
        lambda e: e.conversations.item,
    ),
    _user(
        "DELETE /v1/conversations/conv_{name}/items/{item}",
        "Take an item out of a conversation",
        lambda e: e.conversations.item,
    ),
    _user("POST /v1/files", "Upload a file of requests", lambda e: e.files.all),
    _user("GET /v1/files", "List one's files", lambda e: e.files.all),
    _user("GET /v1/files/file-{name}", "Describe a file", lambda e: e.files.one),
    _user("DELETE /v1/files/file-{name}", "Drop a file", lambda e: e.files.one),
    _user("GET /v1/files/file-{name}/content", "Download a file", lambda e: e.files.content, media=(BYTES,)),
    _user(
        "POST /v1/batches",
        "Have the requests of a file answered",
        lambda e: e.batches.all,
        body=BatchBody,
        required=("input_file_id", "endpoint", "completion_window"),
        example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    _user("GET /v1/batches", "List one's batches", lambda e: e.batches.all),
    _user("GET /v1/batches/batch_{name}", "Describe a batch", lambda e: e.batches.one),
    _user("POST /v1/batches/batch_{name}/cancel", "Cancel a batch", lambda e: e.batches.cancel),
    _user(
        "POST /v1/messages",
        "Answer messages",
        lambda e: e.messages,
        error_body=error_body,
        body=MessagesBody,
        required=("messages", "max_tokens"),
        example={"messages": _HELLO, "max_tokens": 16},
        media=(JSON, EVENTS),
    ),
    _user(
        "POST /v1/messages/count_tokens",
        "Count the tokens",
        lambda e: e.tokens.count_message,
        error_body=error_body,
        body=MessagesBody,
        required=("messages",),
        example={"messages": _HELLO},
    ),
    _user(
        "POST /v1/chat/completions/render",
        "Tell the tokens that a chat has",
        lambda e: e.render_chat,
        body=ChatBody,
        required=("messages",),
        example={"messages": _HELLO},
    ),
    _user(
        "POST /v1/completions/render",
        "Tell the tokens that prompts have",
        lambda e: e.render_completions,
        body=CompletionBody,
        required=("prompt",),
        example={"prompt": _START},
    ),
    _user("GET /v1/models", "List the models that are served", lambda e: e.service.models),
    _user("GET /v1/models/{name:path}", "Describe a model", lambda e: e.service.model),
    _user(
        "POST /tokenize",
        "Turn a text or messages into tokens",
        lambda e: e.tokens.tokenize,
        body=TokenizeBody,
        fields=_PREFIX | {"model", "add_special_tokens"},
        example={"prompt": "Hello"},
    ),
    _user(
        "POST /detokenize",
        "Turn tokens into text",
        lambda e: e.tokens.detokenize,
        body=DetokenizeBody,
        required=("tokens",),
        example={"tokens": [1, 2]},
    ),
    _ollama(
        "POST /api/chat",
        "Answer a chat, for Ollama's clients",
        lambda e: e.ollama_chat,
        body=OllamaChatBody,
        example={"messages": _HELLO},
        media=(LINES, JSON),
    ),
    _ollama(
        "POST /api/generate",
        "Answer a prompt, for Ollama's clients",
        lambda e: e.ollama_generate,
        body=OllamaGenerateBody,
        example={"prompt": "Hello"},
        media=(LINES, JSON),
    ),
    _ollama("GET /api/version", "Tell the version of Ollama's API that is here", lambda e: e.ollama.version),
    _ollama("GET /api/tags", "List the models that are served, for Ollama's clients", lambda e: e.ollama.tags),
    _ollama("GET /api/ps", "List the models in memory, for Ollama's clients", lambda e: e.ollama.ps),
    _ollama(
        "POST /api/show",
        "Describe a model, for Ollama's clients",
        lambda e: e.ollama.show,
        body=NameBody,
        fields=frozenset({"model", "name"}),
        example={},
    ),
    _ollama(
        "POST /api/pull",
        "Tell that a model is here, for Ollama's clients",
        lambda e: e.ollama.pull,
        body=NameBody,
        example={},
        media=(LINES,),
    ),
    _tgi_text("POST /generate", "Continue a text, for TGI's clients", lambda e: e.tgi, media=(JSON, EVENTS)),
    _tgi_text(
        "POST /generate_stream",
        "Continue a text as a stream, for TGI's clients",
        lambda e: e.tgi_stream,
        media=(EVENTS,),
    ),
    _tgi("GET /info", "Describe the model to TGI's clients", lambda e: e.triton.info),
    _triton("GET /v2", "Describe the service to Triton's clients", lambda e: e.triton.server),
    _public("GET /v2/health/live", "Tell whether the HTTP process lives", lambda e: e.triton.live, is_watch=True),
    _public("GET /v2/health/ready", "Tell whether requests are admitted", lambda e: e.triton.ready, is_watch=True),
    _triton_text(
        "POST /v2/models/{name:path}/generate",
        "Continue a text, for Triton's clients",
        lambda e: e.triton_generate,
        media=(JSON, EVENTS),
    ),
    _triton_text(
        "POST /v2/models/{name:path}/generate_stream",
        "Continue a text as a stream, for Triton's clients",
        lambda e: e.triton_stream,
        media=(EVENTS,),
    ),
    _triton("GET /v2/models/{name:path}/ready", "Tell whether the model is ready", lambda e: e.triton.model_ready),
    _triton("GET /v2/models/{name:path}", "Describe the model to Triton's clients", lambda e: e.triton.model),
    _public("GET /health", "Tell whether the HTTP process lives", lambda e: e.service.health, is_watch=True),
    _public("GET /ready", "Tell whether requests are admitted", lambda e: e.service.ready, is_watch=True),
    _metrics(
        "GET /metrics",
        "Tell the metrics in Prometheus' form",
        lambda e: e.service.metrics,
        media=(TEXT,),
        is_watch=True,
    ),
    _user("GET /version", "Tell the version", lambda e: e.service.version),
    _user(
        "GET /kv_event_sources",
        "Tell where events about cached KV blocks are published",
        lambda e: e.replica.kv_event_sources,
    ),
    *(
        _user(f"GET {path}", "Describe the service to routers", lambda e: e.replica.server_info)
        for path in ("/get_server_info", "/server_info")
    ),
    *(
        _user(f"GET {path}", "Describe the model to routers", lambda e: e.replica.model_info)
        for path in ("/get_model_info", "/model_info")
    ),
    _metrics("GET /v1/loads", "Tell the load to routers", lambda e: e.replica.loads),
    _admin("POST /reset_prefix_cache", "Forget all cached prefixes", lambda e: e.service.reset_prefix_cache),
    _admin("POST /sleep", "Take weights and KV out of memory until a request comes", lambda e: e.sleep.sleep),
    _admin("POST /wake_up", "Load the model again after a sleep", lambda e: e.sleep.wake_up),
    _admin("GET /is_sleeping", "Tell whether the service sleeps", lambda e: e.sleep.is_sleeping),
    _user("GET /v1/cache", "List one's cached prefixes", lambda e: e.cache.cache),
    _user("DELETE /v1/cache", "Forget one's cached prefixes", lambda e: e.cache.cache),
    _user(
        "POST /v1/cache/warm",
        "Compute and cache a prompt",
        lambda e: e.warm,
        body=PrefixBody,
        fields=_PREFIX | WARM_FIELDS,
        example={"prompt": "Hello"},
    ),
    _user(
        "POST /v1/cache/pin",
        "Keep a prefix until it is unpinned",
        lambda e: e.cache.pin,
        body=PinBody,
        fields=_PREFIX | PIN_FIELDS | {"id"},
        example={"prompt": "Hello"},
    ),
    _user(
        "POST /v1/cache/unpin",
        "Let a pinned prefix go",
        lambda e: e.cache.unpin,
        body=PinBody,
        fields=_PREFIX | PIN_FIELDS | {"id"},
        example={"prompt": "Hello"},
    ),
    _user("GET /v1/usage", "Tell what the key has used, to an admin what every key has", lambda e: e.usage.usage),
    _admin("GET /v1/requests", "List the answers that are under way", lambda e: e.open_requests.all),
    _admin("POST /v1/requests/{name}/cancel", "Cancel an answer that is under way", lambda e: e.open_requests.cancel),
    _metrics("GET /v1/stats", "Tell the figures of the latest minutes", lambda e: e.live.stats),
    _metrics("GET /v1/stats/stream", "Tell the figures every second", lambda e: e.live.stream, media=(EVENTS,)),
    _admin("GET /v1/experts", "Describe load, balance and placement of the experts", lambda e: e.experts.experts),
    _admin("POST /v1/experts/statistics", "Save the statistics of the experts", lambda e: e.experts.save_statistics),
    _admin(
        "POST /v1/experts/trace",
        "Record a routing trace",
        lambda e: e.experts.trace,
        body=TraceBody,
        required=("action",),
        media=(JSON, BYTES),
    ),
    _public("GET /dashboard", "Show the figures as a page", lambda e: e.pages.file, media=(HTML,)),
    _public("GET /openapi.json", "Describe these routes", lambda e: e.description.openapi),
    _public(
        "GET /",
        "List the routes; show the chat page to browsers, tell Ollama's clients that a server is there",
        lambda e: e.pages.index(e.description.index),
        media=(JSON, HTML, TEXT),
    ),
    *(
        _public(f"GET {path}", "A file of a page", lambda e: e.pages.file, is_file=True)
        for path in FILES
        if path.startswith("/pages/")
    ),
)
