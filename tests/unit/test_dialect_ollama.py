"""Ollama's dialect: names, requests as the template and the engine get them, and lines of answers."""

import pytest

from moeserve.frontend.dialects import ollama
from moeserve.frontend.errors import ApiError


@pytest.mark.parametrize(
    ("file", "level"),
    [
        ("x/Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("owner/name:UD-IQ2_XXS", "IQ2_XXS"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("Q8_0/folder", ""),
    ],
)
def test_the_name_of_a_file_tells_its_quantisation(file: str, level: str) -> None:
    assert ollama.level_of(file) == level


@pytest.mark.parametrize(("names", "asked"), [(("m",), "m:latest"), (("m:latest",), "m"), (("m:q4", "m"), "m")])
def test_latest_is_taken_and_left_out(names: tuple[str, ...], asked: str) -> None:
    assert ollama.served_name(asked, names) in (names[-1], asked)
    with pytest.raises(ApiError, match="does not exist"):
        ollama.served_name("m:other", names)
