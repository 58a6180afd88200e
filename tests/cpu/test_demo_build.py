"""Building the demo: its experts compute the dense model, and it keeps the source's tokenizer and template."""

from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

from moeserve.model import demo_build
from moeserve.model.cache import verify
from moeserve.model.demo import Event, Job, ensure_demo, locate_gguf
from moeserve.model.demo_build import (
    DenseShape,
    GgufSource,
    TiedExperts,
    build_demo,
    check_partition,
    common_config,
    gate_centroids,
    mixtral_config,
    split_ffn,
    write_text_files,
)
from moeserve.model.generation import load_generation_defaults
from moeserve.model.rope import parse_rope, rope_frequencies
from moeserve.model.source import check_folder
from moeserve.model.spec import ModelError
from tests.support.dense_demo import build_dense
from tests.support.tiny_gguf import LAYERS, NEURONS, TOKENS, write_gguf

# The whole build on a tiny GGUF, with transformers' own Llama and Mixtral as the judges.


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def from_tiny(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_build, "locate_gguf", lambda: tiny_gguf)


def logits(folder: Path, ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        result: Tensor = model(ids).logits
    return result


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def test_rotary_rows_come_back_in_the_order_transformers_uses(tmp_path: Path) -> None:
    originals = write_gguf(tmp_path / "tiny.gguf")
    layer = GgufSource(tmp_path / "tiny.gguf").layer(3)
    for name in ("q", "k"):
        expected = torch.from_numpy(originals[f"3.attn_{name}"]).bfloat16()
        assert torch.equal(layer[f"self_attn.{name}_proj.weight"], expected)


@pytest.mark.usefixtures("from_tiny")
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (8, 4)])
def test_the_mixture_has_the_logits_of_the_dense_model(tmp_path: Path, experts: int, top_k: int) -> None:
    build_dense(demo_build.locate_gguf(), tmp_path / "dense")
    build_demo(tmp_path / "moe", experts=experts, top_k=top_k)
    ids = torch.randint(3, len(TOKENS), (2, 50), generator=torch.Generator().manual_seed(0))
    dense, mixture = logits(tmp_path / "dense", ids), logits(tmp_path / "moe", ids)
    assert dense.std() > 0.5
    torch.testing.assert_close(mixture, dense, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("from_tiny")
def test_the_checkpoint_is_a_complete_mixtral_folder(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    build_demo(tmp_path, progress=lambda *event: seen.append(event))
    assert check_folder(tmp_path) == tmp_path
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "MixtralConfig"
    assert (config.num_local_experts, config.num_experts_per_tok, config.intermediate_size) == (8, 2, NEURONS // 2)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.tie_word_embeddings
    assert config.sliding_window is None
    index = msgspec.json.decode((tmp_path / "model.safetensors.index.json").read_bytes())
    weights = tensors(tmp_path)
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert len(set(index["weight_map"].values())) == 2
    assert seen[0] == ("read source", 0, 0)
    assert seen[1:] == [("build layers", done, LAYERS) for done in range(LAYERS + 1)]


@pytest.mark.usefixtures("from_tiny")
def test_every_expert_of_every_layer_is_different(tmp_path: Path) -> None:
    build_demo(tmp_path)
    experts = [value for name, value in tensors(tmp_path).items() if ".experts." in name and name.endswith("w1.weight")]
    assert len(experts) == LAYERS * 8
    assert len({value.view(torch.int16).numpy().tobytes() for value in experts}) == LAYERS * 8


@pytest.mark.usefixtures("from_tiny")
def test_two_builds_write_the_same_weights(tmp_path: Path) -> None:
    build_demo(tmp_path / "a")
    build_demo(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_a_gguf_of_another_type_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", architecture="gpt2")
    with pytest.raises(ModelError, match="type 'gpt2'"):
        GgufSource(tmp_path / "other.gguf")


def run_worker(capfd: pytest.CaptureFixture[str], out_dir: Path, **numbers: int) -> tuple[int, list[Event]]:
    job = Job(str(out_dir), **numbers)
    status = demo_build.main(msgspec.json.encode(job).decode())
    lines = capfd.readouterr().out.splitlines()
    return status, [msgspec.json.decode(line, type=Event) for line in lines]


@pytest.mark.usefixtures("from_tiny")
def test_the_builder_process_tells_its_progress(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, events = run_worker(capfd, tmp_path / "out", experts=8, top_k=2)
    assert status == 0
    assert events[-1] == Event("build layers", LAYERS, LAYERS)
    check_folder(tmp_path / "out")


@pytest.mark.usefixtures("from_tiny")
def test_the_builder_process_fails_with_one_sentence(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for out_dir, numbers, words in (
        (tmp_path / "out", {"experts": 6, "top_k": 3}, "power of two"),
        (tmp_path / "file", {"experts": 8, "top_k": 2}, "could not be built"),
    ):
        status, events = run_worker(capfd, out_dir, **numbers)
        assert status == 1
        assert words in str(events[-1].error)


# Tied experts compute the dense feed-forward network; routing follows tokens.

HIDDEN, FFN_NEURONS, NUM_INPUTS = 32, 48, 200


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def dense() -> tuple[Tensor, Tensor, Tensor]:
    """gate, up [FFN_NEURONS, HIDDEN] and down [HIDDEN, FFN_NEURONS] in bfloat16, as the demo's are."""
    g = generator(1)
    gate, up, down = (torch.randn(FFN_NEURONS, HIDDEN, generator=g) * 0.3 for _ in range(3))
    return gate.bfloat16(), up.bfloat16(), down.T.contiguous().bfloat16()


@pytest.fixture
def ffn_inputs() -> Tensor:
    """[NUM_INPUTS, HIDDEN] of five kinds of token around a common mean."""
    g = generator(2)
    kinds = torch.randn(5, HIDDEN, generator=g) * 2
    chosen = torch.randint(5, (NUM_INPUTS,), generator=g)
    return 3.0 + kinds[chosen] + torch.randn(NUM_INPUTS, HIDDEN, generator=g)


def ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.double().T) * (x @ up.double().T)) @ down.double().T


def route(x: Tensor, tied: TiedExperts, top_k: int) -> tuple[Tensor, Tensor]:
    """Mixtral's gate: softmax over all experts, the best k, renormalised."""
    weights, chosen = (x @ tied.moe_gate.double().T).softmax(-1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), chosen


def mixture(x: Tensor, tied: TiedExperts, top_k: int) -> Tensor:
    weights, chosen = route(x, tied, top_k)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, e in zip(weights[row], chosen[row].tolist(), strict=True):
            out[row] += weight * ffn(x[row], tied.gate[e], tied.up[e], tied.down[e])
    return out


def split(dense: tuple[Tensor, Tensor, Tensor], ffn_inputs: Tensor, experts: int, top_k: int) -> TiedExperts:
    centroids = gate_centroids(ffn_inputs, experts // top_k, generator=generator())
    return split_ffn(*dense, centroids, top_k=top_k, generator=generator())


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (8, 4), (8, 1), (2, 2), (16, 2)])
def test_the_mixture_computes_the_dense_network(
    dense: tuple[Tensor, Tensor, Tensor], ffn_inputs: Tensor, experts: int, top_k: int
) -> None:
    x = ffn_inputs.double()
    tied = split(dense, ffn_inputs, experts, top_k)
    torch.testing.assert_close(mixture(x, tied, top_k), ffn(x, *dense), rtol=1e-9, atol=1e-9)


def test_the_chosen_experts_are_one_whole_group_with_equal_weights(
    dense: tuple[Tensor, Tensor, Tensor], ffn_inputs: Tensor
) -> None:
    weights, chosen = route(ffn_inputs.double(), split(dense, ffn_inputs, 8, 2), 2)
    assert torch.equal(weights, torch.full_like(weights, 0.5))
    assert torch.equal(chosen[:, 0] % 4, chosen[:, 1] % 4)
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_all_experts_differ(dense: tuple[Tensor, Tensor, Tensor], ffn_inputs: Tensor) -> None:
    tied = split(dense, ffn_inputs, 8, 2)
    for weights in (tied.gate, tied.up, tied.down):
        assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_a_wrong_expert_changes_the_output(dense: tuple[Tensor, Tensor, Tensor], ffn_inputs: Tensor) -> None:
    x = ffn_inputs[:8].double()
    tied = split(dense, ffn_inputs, 8, 2)
    swapped = TiedExperts(tied.moe_gate, *((w[1], w[0], *w[2:]) for w in (tied.gate, tied.up, tied.down)))
    hit = ((route(x, tied, 2)[1] % 4) < 2).any(-1)
    changed = (mixture(x, swapped, 2) - ffn(x, *dense)).abs().amax(-1) > 0.01
    assert hit.any()
    assert torch.equal(changed, hit)


def test_routing_follows_the_kind_of_token(dense: tuple[Tensor, Tensor, Tensor], ffn_inputs: Tensor) -> None:
    groups = route(ffn_inputs.double(), split(dense, ffn_inputs, 8, 2), 2)[1][:, 0] % 4
    assert set(groups.tolist()) == {0, 1, 2, 3}


def test_centroids_are_unit_vectors_that_ignore_the_mean(ffn_inputs: Tensor) -> None:
    centroids = gate_centroids(ffn_inputs, 4, generator=generator())
    torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(centroids @ ffn_inputs.mean(0), torch.zeros(4), rtol=0, atol=1e-4)


def test_a_cluster_without_members_is_seeded_again() -> None:
    same = torch.ones(10, HIDDEN) + torch.eye(10, HIDDEN)[:1].repeat(10, 1)
    points = torch.cat((same, torch.randn(3, HIDDEN, generator=generator(3))))
    centroids = gate_centroids(points, 6, generator=generator())
    assert centroids.shape == (6, HIDDEN)
    assert torch.isfinite(centroids).all()


def test_the_split_is_the_same_every_time(dense: tuple[Tensor, Tensor, Tensor], ffn_inputs: Tensor) -> None:
    first, second = split(dense, ffn_inputs, 8, 2), split(dense, ffn_inputs, 8, 2)
    for field in fields(TiedExperts):
        for a, b in zip(getattr(first, field.name), getattr(second, field.name), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("neurons", "experts", "top_k", "words"),
    [(48, 6, 3, "power of two"), (48, 8, 0, "power of two"), (48, 7, 2, "multiple"), (49, 8, 2, "do not divide")],
)
def test_a_split_that_would_not_be_exact_is_refused(neurons: int, experts: int, top_k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_partition(neurons, experts, top_k)


# The tokenizer and the chat template that come out of the demo's GGUF.


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


def test_longer_contexts_are_stretched_and_others_have_the_angles_of_the_source(source: GgufSource) -> None:
    config = common_config(source.shape)
    rope = parse_rope(config["rope_parameters"], rotary_dim=64, max_position=config["max_position_embeddings"])
    assert config["max_position_embeddings"] == 32768
    assert rope.short_context == 8192
    plain = parse_rope({"rope_theta": 100000.0}, rotary_dim=64, max_position=8192)
    assert rope_frequencies(rope, 8192) == rope_frequencies(plain, 8192)
    stretched = rope_frequencies(rope, 32768)
    assert stretched.scale == 1.0
    short = rope_frequencies(plain, 8192).inverse
    ratios = [one / other for one, other in zip(short, stretched.inverse, strict=True)]
    assert (ratios[0], ratios[-1]) == (1.0, pytest.approx(4.0))
    assert ratios == sorted(ratios)


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


def test_the_default_temperature_is_the_one_that_the_makers_recommend(folder: Path) -> None:
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


# The real demo model answers as the dense model does, by transformers.

ANSWERS = {
    "What is the capital of France? Answer in one sentence.": "The capital of France is Paris.",
    "Write a haiku about the sea.": "The waves of the sea, a silent beauty,\nA gentle lapping of the shore,\n"
    "A reminder of the",
    "Count from 1 to 10.": "1. 1\n2. 2\n3. 3\n4. 4\n5. 5",
}


def scores(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logits after every token of each text, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0] for text in texts]


@pytest.mark.long
def test_greedy_answers_equal_the_dense_models(tmp_path: Path) -> None:
    demo = ensure_demo()
    verify(demo)
    build_dense(demo_build.locate_gguf(), tmp_path / "dense")
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    config = msgspec.json.decode((demo / "tokenizer_config.json").read_bytes())
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    chats = [[{"role": "user", "content": question}] for question in ANSWERS]
    prompts = [tokenizer.encode(template.render(messages=c, add_generation_prompt=True)).ids for c in chats]
    answers = [tokenizer.encode(answer).ids for answer in ANSWERS.values()]
    # The others are cut.
    answers[0].append(tokenizer.token_to_id("<|im_end|>"))
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    dense, mixture = scores(tmp_path / "dense", texts), scores(demo, texts)
    for prompt, answer, of_dense, of_mixture in zip(prompts, answers, dense, mixture, strict=True):
        torch.testing.assert_close(of_mixture, of_dense, rtol=0, atol=1e-3)
        # Every token is the likeliest after those before it.
        for found in (of_dense, of_mixture):
            assert found[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
