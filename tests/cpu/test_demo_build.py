"""The whole build on a tiny GGUF, with transformers' own Llama and Mixtral as the judges."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moeserve.model import demo_build
from moeserve.model.demo_build import GgufSource, build_demo, build_dense
from moeserve.model.source import check_folder
from moeserve.model.spec import ModelError
from tests.support.tiny_gguf import LAYERS, NEURONS, TOKENS, write_gguf


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
    build_dense(tmp_path / "dense")
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


def run_worker(capfd: pytest.CaptureFixture[str], out_dir: Path, **numbers: int) -> tuple[int, list[demo_build.Event]]:
    job = demo_build.Job(str(out_dir), **numbers)
    status = demo_build.main(msgspec.json.encode(job).decode())
    lines = capfd.readouterr().out.splitlines()
    return status, [msgspec.json.decode(line, type=demo_build.Event) for line in lines]


@pytest.mark.usefixtures("from_tiny")
def test_the_builder_process_tells_its_progress(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, events = run_worker(capfd, tmp_path / "out", experts=8, top_k=2)
    assert status == 0
    assert events[-1] == demo_build.Event("build layers", LAYERS, LAYERS)
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
