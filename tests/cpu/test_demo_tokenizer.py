"""The tokenizer and the chat template that come out of the demo's GGUF."""

from pathlib import Path

import msgspec
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from moeserve.model.demo import locate_gguf
from moeserve.model.demo_build import DenseShape, GgufSource, mixtral_config, write_text_files
from moeserve.model.families import load_generation_defaults


@pytest.fixture(scope="module")
def source() -> GgufSource:
    return GgufSource(locate_gguf())


@pytest.fixture(scope="module")
def folder(source: GgufSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    write_text_files(path, source.shape, source.vocabulary, mixtral_config(source.shape, experts=8, top_k=2))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_the_gguf_has_the_shape_of_smollm2_135m(source: GgufSource) -> None:
    assert source.shape == DenseShape(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
    )


def test_the_vocabulary_is_complete(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 49152
    assert sorted(tokenizer.get_vocab().values()) == list(range(49152))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2024", ["2", "0", "2", "4"]),
        ("in 1999.", ["in", "Ġ", "1", "9", "9", "9", "."]),
        ("x86 x1y22", ["x", "8", "6", "Ġx", "1", "y", "2", "2"]),
        ("The capital of France", ["The", "Ġcapital", "Ġof", "ĠFrance"]),
        ("don't", ["don", "'t"]),
        ("a\n\n  b", ["a", "ĊĊĠ", "Ġb"]),
        ("", []),
    ],
)
def test_text_is_split_as_the_model_was_trained(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " leading and trailing  ",
        "tabs\tand\r\nlines\n",
        "Žluťoučký kůň — 龍 🐉 مرحبا",
        "1234567890 ٣ ² ½",
        "def f(x):\n    return x**2  # 3.14",
        "\x00\x7f\u200b\ufeff",
    ],
)
def test_every_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_one_id_each_and_vanish_from_plain_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|><|endoftext|>").ids
    assert [ids[0], *ids[-2:]] == [1, 2, 0]
    assert tokenizer.decode(ids) == "user\nHi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|><|endoftext|>"
    assert [tokenizer.token_to_id(t) for t in ("<repo_name>", "<empty_output>")] == [3, 16]


def test_no_token_is_added_that_was_not_written(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a").tokens == ["a"]


def render(folder: Path, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_the_chat_template_adds_its_own_system_message(folder: Path) -> None:
    assert render(folder, [{"role": "user", "content": "Hi"}], add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_chat_template_keeps_the_callers_system_message(folder: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    ]
    assert render(folder, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
    )


def test_who_asks_for_no_temperature_gets_the_one_its_makers_recommend(folder: Path) -> None:
    assert load_generation_defaults(folder).sampling == {"temperature": 0.2, "top_p": 0.9}


def test_the_configs_name_the_same_special_tokens(folder: Path) -> None:
    tokenizer_config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    assert tokenizer_config["bos_token"] == "<|im_start|>"
    assert tokenizer_config["eos_token"] == tokenizer_config["pad_token"] == "<|im_end|>"
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    generation_config = msgspec.json.decode((folder / "generation_config.json").read_bytes())
    assert {key: generation_config[key] for key in ends} == ends
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    assert {key: config[key] for key in ends} == ends
