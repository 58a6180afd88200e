"""The text of a 404: it names the server that has a well-known route which this one lacks."""

from __future__ import annotations

_TEXT_ALONE = "This server generates text alone"
_ELSEWHERE = (
    (
        ("/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score", "/pooling"),
        f"{_TEXT_ALONE}: for embeddings and ranking run a server for these models beside it, such as `llama-server "
        "--embeddings -m MODEL.gguf` or text-embeddings-inference, and give clients its address for them",
    ),
    (
        ("/v1/audio",),
        f"{_TEXT_ALONE}: for speech run a server for it beside this one, such as whisper.cpp's `whisper-server`, and "
        "give clients its address for it",
    ),
    (
        ("/v1/images", "/v1/videos"),
        f"{_TEXT_ALONE}: for images run a server for them beside this one, such as stable-diffusion.cpp's `sd-server`, "
        "and give clients its address for them",
    ),
    (
        ("/api/chat", "/api/generate", "/api/tags", "/api/show"),
        "Ollama's API is not served here: set clients to OpenAI's, at /v1",
    ),
)


def why_absent(path: str, known: frozenset[str]) -> str:
    """Return the sentence for a path that has no route. known: the paths that have one."""
    for prefixes, sentence in _ELSEWHERE:
        if any(path == prefix or path.startswith(prefix + "/") for prefix in prefixes):
            return sentence
    shown = path[:200]
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        if meant != path and meant in known:
            return f"There is no {shown} here, but {meant}"
    return f"There is no {shown} here; GET / lists what there is"
