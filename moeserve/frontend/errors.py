"""Errors as a client sees them.

They come from a fixed set of kinds and never show a traceback or other internals. Their shape is OpenAI's but where the
routes of another API have an `ErrorBody` of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import msgspec

# The code of a refusal because the request would wait too long.
OVERLOADED = "overloaded"


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is refused or failed. `param` names the field, `code` is for programs, `message` for people.

    Codes are OpenAI's where its API has one.

    may_retry: False tells clients of OpenAI and Anthropic, which retry after 5xx by themselves, not to.
    """

    status: int
    message: str
    _: KW_ONLY
    type: str = "invalid_request_error"
    param: str | None = None
    code: str = "invalid_value"
    retry_after_s: float | None = None
    may_retry: bool = True
    close: bool = False
    allow: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """`{"error": {...}}`: the body of a response and the data of an error event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The error as an event of OpenAI's streams."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that belong to the status: when to retry, how to ask, and whether the connection ends here."""
        headers = []
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if not self.may_retry:
            headers.append((b"x-should-retry", b"false"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.close:
            headers.append((b"connection", b"close"))
        return headers


# Returns the body of an error's response, in the shape of one API, from the error and the request's id.
ErrorBody = Callable[[ApiError, str], bytes]


def openai_error_body(error: ApiError, _: str) -> bytes:
    """Return the body that OpenAI's API has; the id is in a header alone."""
    return error.body()


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def missing(param: str) -> ApiError:
    """400: a field is not there."""
    return invalid(f"`{param}` is required", param, "missing_required_parameter")


def too_many(param: str, most: int, things: str) -> ApiError:
    """400: a field has more entries than it may."""
    return invalid(f"`{param}` takes at most {most} {things}", param, "too_many_values")


def too_long(param: str, most: int, unit: str) -> ApiError:
    """400: a text is longer than it may be. unit: characters or bytes."""
    return invalid(f"`{param}` takes at most {most} {unit}", param, "string_above_max_length")


def unsupported(param: str, value: str | None = None) -> ApiError:
    """400: a field, or a value of it, that would change the answer and that this server does not support."""
    what = param if value is None else f"{param}={value}"
    return ApiError(400, f"`{what}` is not supported by this server", param=param, code="unsupported_parameter")


def chat_template_failed(message: str) -> ApiError:
    """400: the model's chat template makes no prompt of the messages."""
    return invalid(message, "messages", "chat_template_failed")


def forbidden(message: str, param: str | None = None, code: str = "insufficient_role") -> ApiError:
    """403: the caller may not."""
    return ApiError(403, message, type="permission_error", param=param, code=code)


def key_gone() -> ApiError:
    """401: the caller's key was taken out of the key file."""
    return ApiError(401, "This API key is not valid any more", type="authentication_error", code="key_gone")


def conflict(message: str, code: str) -> ApiError:
    """409: not as things stand."""
    return ApiError(409, message, type="conflict", code=code)


def context_length_exceeded(
    limit: int, prompt_tokens: int, output_tokens: int, *, at_least: bool = False, param: str | None = None
) -> ApiError:
    """400: prompt and output do not fit; the message gives the limit and both counts. param: the prompt's field."""
    about = "at least " if at_least else ""
    message = (
        f"This model's maximum context length is {limit} tokens, but {about}{prompt_tokens + output_tokens} were "
        f"requested ({about}{prompt_tokens} in the prompt and {output_tokens} for the output). "
        "Shorten the prompt or ask for fewer tokens."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def longest_output(num_prompt_tokens: int, max_model_len: int, param: str | None = None) -> int:
    """Return how many tokens the context leaves for the output. Raise ApiError where it leaves none."""
    if num_prompt_tokens >= max_model_len:
        raise context_length_exceeded(max_model_len, num_prompt_tokens, 1, param=param)
    return max_model_len - num_prompt_tokens


def check_choices(num_choices: int, most: int) -> None:
    """Raise ApiError for a request of more choices than one may have."""
    if num_choices > most:
        raise invalid(f"The request asks for {num_choices} choices; this server takes {most} in one request", "n")


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    served = " or ".join(f"`{one}`" for one in names[:3])
    message = f"The model `{name[:200]}` does not exist: this server has {served}"
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, code: str, retry_after_s: float = 1.0, *, close: bool = False) -> ApiError:
    """503: not now."""
    return ApiError(503, message, type="server_unavailable", code=code, retry_after_s=retry_after_s, close=close)


def internal_error(message: str = "The request failed inside the server") -> ApiError:
    """500: the server failed."""
    return ApiError(500, message, type="server_error", code="internal_error")
