"""The weights of a model over ranks that compute every layer together: each rank holds a shard of the matrices.

A shard has some heads of attention and of recurrent layers, some channels of dense blocks and shared experts, and some
rows of the embedding and the output projection. Its outputs are parts: the sum over ranks is the model's. Gates, norms,
latents and the biases of sums are whole. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moeserve.model.spec import AttentionSpec, DecoderSpec, DeltaNetSpec, MlaSpec, MoeSpec, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `count`."""

    number: int
    count: int

    def of(self, size: int) -> range:
        """Return the part of `size` things. Parts differ by one thing at most."""
        return range(size * self.number // self.count, size * (self.number + 1) // self.count)

    def of_equal(self, size: int) -> range:
        """Return the part of `size` things where all parts have as many: parts overlap if `size` is not divisible."""
        length = -(-size // self.count)
        first = min(self.number * length, size - length)
        return range(first, first + length)

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return the KV heads of the shard's query heads: ranks share a head where there are fewer than ranks."""
        if num_kv_heads >= self.count:
            return self.of(num_kv_heads)
        head = self.number * num_kv_heads // self.count
        return range(head, head + 1)

    def heads(self, num_heads: int, num_kv_heads: int) -> range:
        """Return the shard's query heads."""
        if num_kv_heads < self.count:
            return self.of(num_heads)
        kv_heads, group = self.of(num_kv_heads), num_heads // num_kv_heads
        return range(kv_heads.start * group, kv_heads.stop * group)


WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows (`dim` 0) or columns (1) of a tensor that a shard has, ranges of the `size` there are."""

    dim: int
    size: int
    ranges: tuple[range, ...]

    @property
    def length(self) -> int:
        return sum(map(len, self.ranges))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the cut of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])

    def whole_shape(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor whose cut has the shape `cut`."""
        return (*cut[: self.dim], self.size, *cut[self.dim + 1 :])


# By the key of a tensor in a plan of weights: None for one that only the first shard has. Others are whole.
Cuts = Mapping[str, Cut | None]


def check_shards(spec: DecoderSpec, count: int) -> None:
    """Raise UnsupportedModel if a model cannot be cut into `count` shards: each has some heads and channels."""
    has_other_states = spec.recurrent is not None and not isinstance(spec.recurrent, DeltaNetSpec)
    if spec.added_norms or spec.single_parts or has_other_states:
        raise UnsupportedModel(
            f"--tensor-parallel-size {count}: layers of {spec.model_type} models are not shared among ranks so far."
        )
    attention, net, moe = spec.attention, spec.recurrent, spec.moe
    sizes, unequal = {"attention heads": attention.num_heads}, False
    if isinstance(attention, AttentionSpec):
        shares_heads = attention.num_kv_heads < count and not (
            count % attention.num_kv_heads or attention.num_heads % count
        )
        if not shares_heads:
            sizes = {"KV heads": attention.num_kv_heads}
            # Ranks gather the heads, of which each then has as many.
            unequal = attention.qk_norm == "flat" and attention.num_kv_heads % count > 0
    if isinstance(net, DeltaNetSpec):
        sizes["key heads of recurrent layers"] = net.num_key_heads
    if not all(spec.sparse_layers):
        sizes["channels of dense blocks"] = spec.intermediate_size
    if moe is not None and moe.shared is not None:
        sizes["channels of shared experts"] = moe.shared.intermediate_size
    for name, size in sizes.items():
        if size < count or (unequal and name == "KV heads"):
            raise UnsupportedModel(
                f"--tensor-parallel-size {count}: {size} {name} of this {spec.model_type} model cannot be shared"
                f"{' equally' if unequal else ''}."
            )


def sharded(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """Return the decoder that has the heads and channels of a shard alone. Its vocabulary is whole."""
    if shard == WHOLE:
        return spec
    attention, net, moe = spec.attention, spec.recurrent, spec.moe
    cut: AttentionSpec | MlaSpec
    if isinstance(attention, MlaSpec):
        cut = replace(attention, num_heads=len(shard.of(attention.num_heads)))
    else:
        num_kv_heads = len(shard.kv_heads(attention.num_kv_heads))
        num_heads = len(shard.heads(attention.num_heads, attention.num_kv_heads))
        cut = replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if isinstance(net, DeltaNetSpec):
        num_keys = len(shard.of(net.num_key_heads))
        num_values = len(shard.heads(net.num_value_heads, net.num_key_heads))
        net = replace(net, num_key_heads=num_keys, num_value_heads=num_values)
    if moe is not None and moe.shared is not None:
        width = len(shard.of(moe.shared.intermediate_size))
        moe = replace(moe, shared=replace(moe.shared, intermediate_size=width))
    width = len(shard.of(spec.intermediate_size))
    return replace(spec, attention=cut, recurrent=net, moe=moe, intermediate_size=width)


def outer_cuts(spec: DecoderSpec, shard: Shard) -> Cuts:
    """Return the cuts of the tensors outside the layers. All shards give equally many logits of a row."""
    size = spec.vocab_size
    logits = Cut(0, size, (shard.of_equal(size),))
    return {"embedding": Cut(0, size, (shard.of(size),)), "lm_head": logits, "lm_head.bias": logits}


def layer_cuts(spec: DecoderSpec, layer: int, shard: Shard) -> Cuts:
    """Return the cuts of the tensors of a layer, its experts excepted."""
    attention = spec.attention
    if isinstance(spec.recurrent, DeltaNetSpec) and spec.is_recurrent(layer):
        cuts = _delta_net(spec.recurrent, shard)
    elif isinstance(attention, MlaSpec):
        cuts = _mla(attention, shard)
    else:
        cuts = _gqa(attention, shard)
    if not spec.sparse_layers[layer]:
        return cuts | _gated("", spec.intermediate_size, shard)
    return cuts | _shared(spec.moe, shard)


def _parts(dim: int, unit: int, heads: range, num_heads: int) -> Cut:
    """Return the cut of neighbouring heads of `unit` rows or columns each."""
    return Cut(dim, num_heads * unit, (range(heads.start * unit, heads.stop * unit),))


def _gqa(attention: AttentionSpec, shard: Shard) -> dict[str, Cut | None]:
    num_heads, num_kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    heads, kv_heads = shard.heads(num_heads, num_kv_heads), shard.kv_heads(num_kv_heads)
    q = _parts(0, width * (1 + attention.gated), heads, num_heads)
    kv = _parts(0, width, kv_heads, num_kv_heads)
    cuts = {"q": q, "k": kv, "v": kv, "q.bias": q, "k.bias": kv, "v.bias": kv, "sinks": _parts(0, 1, heads, num_heads)}
    return cuts | _out("o", _parts(1, width, heads, num_heads), shard)


def _mla(mla: MlaSpec, shard: Shard) -> dict[str, Cut | None]:
    heads = shard.of(mla.num_heads)
    q = _parts(0, mla.nope_dim + mla.rope_dim, heads, mla.num_heads)
    kv_b = _parts(0, mla.nope_dim + mla.value_dim, heads, mla.num_heads)
    return {"q": q, "q_b": q, "kv_b": kv_b} | _out("o", _parts(1, mla.value_dim, heads, mla.num_heads), shard)


def _delta_net(net: DeltaNetSpec, shard: Shard) -> dict[str, Cut | None]:
    keys = shard.of(net.num_key_heads)
    values = shard.heads(net.num_value_heads, net.num_key_heads)
    # Queries, keys and values lie one behind the other.
    firsts = (0, net.key_channels, 2 * net.key_channels)
    parts = zip(firsts, (net.key_dim, net.key_dim, net.value_dim), (keys, keys, values), strict=True)
    own = tuple(range(at + heads.start * width, at + heads.stop * width) for at, width, heads in parts)
    qkv = Cut(0, net.conv_channels, own)
    per_key = (net.conv_channels + net.value_channels) // net.num_key_heads
    group = net.num_value_heads // net.num_key_heads
    cuts: dict[str, Cut | None] = {
        "qkvz": _parts(0, per_key, keys, net.num_key_heads),
        "ba": _parts(0, 2 * group, keys, net.num_key_heads),
        "qkv": qkv,
        "z": _parts(0, net.value_dim, values, net.num_value_heads),
        "conv": qkv,
    }
    cuts |= dict.fromkeys(("b", "a", "decay", "step_bias"), _parts(0, 1, values, net.num_value_heads))
    return cuts | _out("out", _parts(1, net.value_dim, values, net.num_value_heads), shard)


def _gated(prefix: str, width: int, shard: Shard) -> dict[str, Cut | None]:
    channels = shard.of(width)
    first = _parts(0, 1, channels, width)
    cuts: dict[str, Cut | None] = {f"{prefix}{name}": first for name in ("gate", "up", "gate.bias", "up.bias")}
    both = channels, range(width + channels.start, width + channels.stop)
    cuts[f"{prefix}gate_up"] = Cut(0, 2 * width, both)
    return cuts | _out(f"{prefix}down", _parts(1, 1, channels, width), shard)


def _shared(moe: MoeSpec | None, shard: Shard) -> dict[str, Cut | None]:
    return {} if moe is None or moe.shared is None else _gated("shared.", moe.shared.intermediate_size, shard)


def _out(key: str, columns: Cut, shard: Shard) -> dict[str, Cut | None]:
    """Return the cut of a projection whose outputs are parts of a sum; its bias is in the first part."""
    return {key: columns} if shard.number == 0 else {key: columns, f"{key}.bias": None}
