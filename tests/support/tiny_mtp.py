"""Tiny checkpoints with a layer that predicts further tokens (MTP), and what it predicts, computed by transformers'
modules over whole texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.tiny_models import build

# By case: the beginning of the names of the layer's tensors in a checkpoint, and the names of its other parts.
_NAMES = {
    "glm4_moe": ("model.layers.{}", "{0}.enorm", "{0}.hnorm", "{0}.eh_proj", "{0}.shared_head.norm"),
    "deepseek_v3-yarn": ("model.layers.{}", "{0}.enorm", "{0}.hnorm", "{0}.eh_proj", "{0}.shared_head.norm"),
    "qwen3_next": ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen3_5_text": ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen3_5_moe": ("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "ernie4_5_moe": (
        "model.mtp_block.0",
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        "model.mtp_linear_proj.0",
        None,
    ),
}
CASES = tuple(_NAMES)


@dataclass(frozen=True, slots=True)
class MtpOracle:
    """A model of transformers without its last layer, which predicts further tokens from what the others compute."""

    model: Any
    layer: Any
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: nn.Linear
    norm: nn.Module | None
    returns_normed: bool

    @torch.inference_mode()
    def predict(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that may follow the text, as the layer predicts them from it."""
        inner = getattr(self.model.model, "language_model", self.model.model)
        ids = torch.tensor([list(token_ids)])
        states = inner(ids, use_cache=False).last_hidden_state[:, :-1]
        ids, found = ids[:, 1:], list[int]()
        for _ in range(count):
            out = self._layer(inner, ids, states)
            normed = out if self.norm is None else self.norm(out)
            found.append(int(self.model.lm_head(normed[:, -1]).argmax(-1)))
            # The layer sees its own prediction, and its own state for the one that was not computed.
            states = torch.cat([states, (normed if self.returns_normed else out)[:, -1:]], 1)
            ids = torch.cat([ids, torch.tensor([found[-1:]])], 1)
        return found

    def _layer(self, inner: Any, ids: Tensor, states: Tensor) -> Tensor:
        """ids [1, T]: of the tokens after the positions of states [1, T, hidden]."""
        both = [self.embedding_norm(inner.embed_tokens(ids)), self.hidden_norm(states)]
        entered = self.projection(torch.cat(both, -1))
        length = ids.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        angles = inner.rotary_emb(entered, positions)
        out = self.layer(entered, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return out[0] if isinstance(out, tuple) else out


def save_with_mtp(case: str, folder: Path, *, is_apt: bool = False, **fields: Any) -> MtpOracle:
    """Save a tiny model of `CASES`, whose last layer is its MTP layer. fields: of its configuration.

    is_apt: the next token depends little on more than the last one, and the layer is often right.
    """
    torch.manual_seed(5)
    # One layer more than the model has, with attention.
    layers: dict[str, Any] = {}
    if "qwen" in case:
        layers["layer_types"] = ["linear_attention", "full_attention"] * 2 + ["full_attention"]
    number = 4 if layers else 3
    if case == "qwen3_next":
        layers["mlp_only_layers"] = [1]
    if case == "ernie4_5_moe":
        # Its MTP layer has no experts.
        layers["moe_layer_end_index"] = number - 1
    model = build(case, **{"num_hidden_layers": number + 1, **layers, **fields})
    inner = getattr(model.model, "language_model", model.model)
    if is_apt:
        with torch.no_grad():
            for name, tensor in inner.named_parameters():
                if "o_proj" in name or "out_proj" in name or "down_proj" in name:
                    tensor *= 0.02
            inner.norm.weight -= 0.8 * (inner.norm.weight - inner.norm.weight.mean())
    model.save_pretrained(folder)
    layer = inner.layers[number]
    block, *parts = _NAMES[case]
    block = block.format(number)
    names = [None if part is None else part.format(block) for part in parts]
    hidden = inner.config.hidden_size
    norms = [type(inner.norm)(hidden, eps=inner.config.rms_norm_eps) for name in (names[0], names[1], names[3]) if name]
    spread = 0.1 if is_apt else 0.5
    with torch.no_grad():
        for norm in norms:
            norm.weight += torch.empty_like(norm.weight).uniform_(-spread, spread)
    projection = nn.Linear(2 * hidden, hidden, bias=False)
    nn.init.normal_(projection.weight, 0, 0.004 if is_apt else 0.15)
    if is_apt:
        with torch.no_grad():
            projection.weight[:, :hidden] += 0.15 * torch.eye(hidden)
    _rewrite(folder, number, block, dict(zip(names, [*norms[:2], projection, *norms[2:]], strict=False)))
    inner.layers = inner.layers[:number]
    for outer in (model.config, inner.config):
        outer.num_hidden_layers = number
    normed = block.startswith("mtp.")
    return MtpOracle(model, layer, norms[0], norms[1], projection, norms[2] if len(norms) > 2 else None, normed)


def _rewrite(folder: Path, number: int, block: str, parts: dict[str | None, nn.Module]) -> None:
    """Give the last layer of a saved model the names of an MTP layer, and add the tensors of its other parts."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        before, found, after = name.partition(f"layers.{number}.")
        tensors[f"{block}.{after}" if found and "visual" not in before else name] = tensor
    tensors |= {
        f"{name}.weight": part.get_parameter("weight").detach().clone()
        for name, part in parts.items()
        if name is not None
    }
    save_file(tensors, file, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for fields in (config, config.get("text_config", {})):
        if "num_hidden_layers" in fields:
            fields["num_hidden_layers"] = number
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:number]
    path.write_text(json.dumps(config))
