"""The errors a client sees: OpenAI's shape, from a fixed set of kinds, without a trace of our insides."""

from __future__ import annotations

import math

import msgspec


class ApiError(Exception):
    """A request that is refused or failed. `param` names the field, `code` is for programs, `message` for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.close = close

    def body(self) -> bytes:
        """`{"error": {...}}`: the body of a response and the data of an error event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that go with the status: when to come back, and whether the connection ends here."""
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.close:
            headers.append((b"connection", b"close"))
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, value: str | None = None) -> ApiError:
    """400: a field, or one value of it, that would change the answer and is not served."""
    what = param if value is None else f"{param}={value}"
    return ApiError(400, f"`{what}` is not supported by this server", param=param, code="unsupported_parameter")


def context_length_exceeded(
    limit: int, prompt_tokens: int, output_tokens: int, *, at_least: bool = False, param: str | None = None
) -> ApiError:
    """400: prompt plus output do not fit; the message carries the limit and both counts. param: where the prompt is."""
    about = "at least " if at_least else ""
    message = (
        f"This model's maximum context length is {limit} tokens, but {about}{prompt_tokens + output_tokens} were "
        f"requested ({about}{prompt_tokens} in the prompt and {output_tokens} for the output). "
        "Shorten the prompt or ask for fewer tokens."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unknown_model(name: str) -> ApiError:
    """404: no model of that name is served."""
    return ApiError(404, f"The model `{name[:200]}` does not exist", param="model", code="model_not_found")


def unavailable(message: str, code: str, retry_after_s: float = 1.0, *, close: bool = False) -> ApiError:
    """503: not now."""
    return ApiError(503, message, type="server_unavailable", code=code, retry_after_s=retry_after_s, close=close)


def internal_error(message: str = "The request failed inside the server") -> ApiError:
    """500: our fault."""
    return ApiError(500, message, type="server_error", code="internal_error")
