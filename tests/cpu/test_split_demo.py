"""The neuron-split demo: with all experts it is the dense model, with some it is what a plain reference computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM

from launcher.cli import build_demo
from moeserve.model import demo, demo_build, split_demo
from moeserve.model.demo import Event, Job, read_quality
from moeserve.model.families import build_spec, load_config
from moeserve.model.source import check_folder, resolve_model
from moeserve.model.spec import ModelError, Progress
from moeserve.model.split_demo import build_split, num_shared, split_neurons
from moeserve.model.weights import load_decoder
from tests.support.dense_demo import build_dense
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_gguf import NEURONS, TOKENS, write_gguf

EXPERTS = 6


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def folders(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        for module in (demo_build, split_demo):
            patch.setattr(module, "locate_gguf", lambda: gguf)
        build_dense(gguf, root / "dense")
        build_split(root / "all", experts=EXPERTS, top_k=EXPERTS)
        build_split(root / "two", experts=EXPERTS, top_k=2)
    return {name: root / name for name in ("dense", "all", "two")}


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = torch.randint(3, len(TOKENS), (40,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids


def served(folder: Path, prompt: list[int]) -> Tensor:
    """Logits through the paged decoder, in two chunks."""
    decoder = load_decoder(folder, build_spec(load_config(folder)), max_model_len=64)
    runner = PagedRunner(decoder, [prompt])
    return torch.cat([runner.step([(0, 0, 23)]), runner.step([(0, 23, len(prompt))])])


def dense_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def split_layer(weights: dict[str, Tensor], prefix: str, top_k: int) -> Any:
    """One feed-forward block from the checkpoint's tensors, token by token."""

    def glu(part: str, x: Tensor) -> Tensor:
        gate, up, down = (weights[f"{prefix}.{part}.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for row, token in enumerate(x[0]):
            scores = linear(token, weights[f"{prefix}.gate.weight"], weights[f"{prefix}.gate.bias"])
            best = scores.sort(descending=True).indices[:top_k].tolist()
            out[0, row] = glu("shared_experts", token) + sum(glu(f"experts.{expert}", token) for expert in best)
        return out

    return forward


@torch.inference_mode()
def reference(folders: dict[str, Path], prompt: list[int], top_k: int) -> Tensor:
    """transformers' dense model with its feed-forward blocks replaced."""
    model, weights = dense_model(folders["dense"]), tensors(folders["two"])
    for number, layer in enumerate(model.model.layers):
        layer.mlp.forward = split_layer(weights, f"model.layers.{number}.mlp", top_k)
    logits: Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def test_all_experts_together_are_the_dense_model(folders: dict[str, Path], prompt: list[int]) -> None:
    with torch.inference_mode():
        dense = dense_model(folders["dense"])(torch.tensor([prompt])).logits[0]
    assert dense.std() > 0.5
    torch.testing.assert_close(served(folders["all"], prompt), dense, rtol=0, atol=1e-4)


def test_two_experts_give_what_a_plain_reference_gives(folders: dict[str, Path], prompt: list[int]) -> None:
    found, expected = served(folders["two"], prompt), reference(folders, prompt, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(found, served(folders["all"], prompt), atol=1e-2)


def test_quality_is_measured_on_both_models(folders: dict[str, Path]) -> None:
    everything, two = read_quality(folders["all"]), read_quality(folders["two"])
    assert everything.tokens == two.tokens > 500
    assert everything.split == pytest.approx(everything.dense, rel=1e-4)
    assert two.dense == everything.dense
    assert abs(two.split / two.dense - 1) > 1e-3


def test_the_folder_can_be_served_and_every_neuron_is_somewhere_once(folders: dict[str, Path]) -> None:
    check_folder(folders["two"])
    spec = build_spec(load_config(folders["two"]))
    assert spec.moe is not None
    assert spec.moe.shared is not None
    assert spec.moe.shared.intermediate_size + EXPERTS * spec.moe.intermediate_size == NEURONS
    rows = {tuple(row.tolist()) for row in tensors(folders["dense"])["model.layers.0.mlp.gate_proj.weight"]}
    parts = [
        value
        for name, value in tensors(folders["two"]).items()
        if name.startswith("model.layers.0.mlp.") and name.endswith("gate_proj.weight")
    ]
    assert len(parts) == EXPERTS + 1
    assert sorted(tuple(row.tolist()) for part in parts for row in part) == sorted(rows)


def test_neurons_that_fire_together_become_one_expert() -> None:
    random = torch.Generator().manual_seed(0)
    kinds = torch.randint(0, 3, (400,), generator=random)
    inputs = torch.nn.functional.one_hot(kinds, 3).float() * 4 + 0.1 * torch.randn(400, 3, generator=random)
    of_kind = torch.tensor([0, 3, 3, 3, 1, 3, 3, 3, 2, 3, 3, 3] * 2)
    gate = torch.where(of_kind[:, None] == torch.arange(3), 1.0, -2.0)
    gate[of_kind == 3] = 3.0
    split = split_neurons(inputs, gate, torch.ones(24, 3), torch.ones(3, 24), 3, generator=random)
    assert of_kind[split.shared].tolist() == [3] * num_shared(24, 3) == [3] * 18
    assert sorted(of_kind[part].tolist() for part in split.experts) == [[0, 0], [1, 1], [2, 2]]
    # The gate finds the expert of a kind from the input alone.
    chosen = (inputs @ split.gate.T + split.bias).argmax(-1)
    assert [of_kind[split.experts[expert][0]].item() for expert in chosen.tolist()] == kinds.tolist()


def test_more_experts_than_neurons_are_refused() -> None:
    with pytest.raises(ValueError, match="50 experts cannot share a third of 100 neurons"):
        num_shared(100, 50)


@pytest.fixture
def built_here(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds happen in this process and read the tiny source."""

    def run(module: str, job: Job, report: Progress) -> None:
        assert module == "split_demo"
        events: list[Event] = []
        monkeypatch.setattr(demo_build, "_send", events.append)
        if demo_build.main(msgspec.json.encode(job).decode(), build_split):
            raise ModelError(str(events[-1].error))

    for module in (demo, demo_build, split_demo):
        monkeypatch.setattr(module, "locate_gguf", lambda: gguf)
    monkeypatch.setattr(demo, "FFN_BYTES", 0)
    monkeypatch.setattr(demo, "OTHER_BYTES", 0)
    monkeypatch.setattr(demo, "_run_builder", run)


@pytest.mark.usefixtures("built_here")
def test_the_command_prints_the_folder_and_its_perplexity(tmp_path: Path) -> None:
    out = tmp_path / "split"
    result = CliRunner().invoke(build_demo, ["--split", "--experts", "6", "--out", str(out)])
    assert result.exit_code == 0, result.output
    folder, quality = result.stdout.splitlines()
    assert folder == str(out)
    assert quality.startswith(f"perplexity {read_quality(out).split:.2f}, of the dense model ")


@pytest.mark.usefixtures("built_here")
def test_its_name_is_served_unless_there_is_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = resolve_model("demo-split", cache_dir=tmp_path / "cache")
    assert folder == tmp_path / "cache" / "demo" / "smollm2-135m-split-e16-k2"
    assert build_spec(load_config(folder)).model_type == "moeserve_demo"
    with pytest.raises(ModelError, match="A revision"):
        resolve_model("demo-split", revision="main", cache_dir=tmp_path / "cache")
    (tmp_path / "demo-split").mkdir()
    with pytest.raises(ModelError, match="has no config"):
        resolve_model("demo-split", cache_dir=tmp_path / "cache")


@pytest.mark.usefixtures("built_here")
@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (["--experts", "2", "--top-k", "3"], "cannot have 2 experts with 3 active"),
        (["--experts", "99"], "99 experts cannot share"),
    ],
)
def test_numbers_that_cannot_be_are_one_sentence(tmp_path: Path, numbers: list[str], words: str) -> None:
    result = CliRunner().invoke(build_demo, ["--split", *numbers, "--out", str(tmp_path / "split")])
    assert result.exit_code == 1
    assert words in result.stderr
    assert not (tmp_path / "split").exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(build_demo, ["--split", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "is there already and no demo model" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"
