"""The routes by which clients of TGI and of Triton Inference Server look at a service, and generate."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.config import VERSION
from moeserve.frontend.dialects.ollama import served_name
from moeserve.frontend.http import json_response
from moeserve.frontend.routes.generate import GenerateRoute
from moeserve.frontend.services import Services

_TEXT = {"datatype": "BYTES", "shape": [1]}


class TritonRoutes:
    """Health, the server and the model as Triton describes them; TGI's description of the model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def live(self, _: Request) -> Response:
        """Answer 200 while this process lives."""
        return Response()

    async def ready(self, _: Request) -> Response:
        """Answer 200 if generations are admitted, else 400, as Triton does."""
        return Response(status_code=200 if self._services.not_ready_reason() is None else 400)

    async def model_ready(self, request: Request) -> Response:
        self._named(request.path_params["name"])
        return await self.ready(request)

    async def server(self, _: Request) -> Response:
        return json_response({"name": "moeserve", "version": VERSION, "extensions": ["generate"]})

    async def model(self, request: Request) -> Response:
        return json_response(
            {
                "name": self._named(request.path_params["name"]),
                "versions": ["1"],
                "platform": "moeserve",
                "inputs": [{"name": "text_input", **_TEXT}],
                "outputs": [{"name": "text_output", **_TEXT}],
            }
        )

    async def info(self, _: Request) -> Response:
        """Answer as TGI's `/info`."""
        facts, config = self._services.check_serving(), self._services.run.config
        return json_response(
            {
                "model_id": facts.names[0],
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": config.max_num_seqs,
                "max_best_of": 1,
                "max_stop_sequences": 4,
                "max_input_tokens": facts.max_model_len - 1,
                "max_total_tokens": facts.max_model_len,
                "version": VERSION,
                "router": "moeserve",
            }
        )

    def _named(self, name: str) -> str:
        """Return the served name of a path. Raise ApiError (404)."""
        run = self._services.run
        return served_name(name, run.served_model_names, takes_any=run.takes_any_name)


class TritonGenerateRoute:
    """The ASGI endpoint of a generation whose path names the model."""

    def __init__(self, services: Services, generate: GenerateRoute) -> None:
        self._services = services
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._services.run
        served_name(scope["path_params"]["name"], run.served_model_names, takes_any=run.takes_any_name)
        await self._generate(scope, receive, send)
