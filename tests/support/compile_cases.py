"""Launches of every kernel at the shapes of well-known models, for compiling only: tensors hold nothing.

Each set of cases is a function of what the GPU's multiprocessors allow; it yields (name, function that launches).
`python -m tests.support.compile_only SET...` compiles sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.variants.few_experts import few_rows_experts
from benchmarks.kernels.variants.fused_decode import NewHeads, rotate_store_and_attend
from benchmarks.kernels.variants.split_filters import keep_by_split_rows
from benchmarks.kernels.variants.split_linear import add_norm_linear
from kernels.gated_delta_rule import DeltaHeads
from kernels.gpu.attention import PagedContext, Partials, Scoring, prefill_attention, split_attention
from kernels.gpu.attention_config import EXTEND_TOKENS, SHORT_QUERIES, AttentionShape
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.device import Multiprocessor
from kernels.gpu.moe import MoeWorkspace, moe_experts
from kernels.gpu.moe_config import MoeShape, config_for
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from kernels.gpu.norm import add_rms_norm, layer_norm, rms_norm
from kernels.gpu.packed_linear import multiply_rows
from kernels.gpu.packed_rows import PackedForm, look_up_packed, packed_form
from kernels.gpu.recurrent import gated_delta_rule, gated_norm, mamba1_scan, mamba2_scan, short_conv
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.gpu.sampling import greedy, sample
from kernels.mamba import MambaHeads
from kernels.specs import Activation, GateSpec
from kernels.state_rows import StateRows
from kernels.weight_formats import FORMATS

Cases = Iterator[tuple[str, Callable[[], object]]]
BF16, FP16, FP8, FP32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
KV_HEADS = 2
META = torch.device("meta")
STORED = {"bfloat16": BF16, "float32": FP32, "int8": torch.int8, "fp8": FP8}
SILU = Activation()
# Sizes of keys and values.
SERVED_HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512))
QWEN = (128, 768, 2048, 8)
MIXTRAL = (8, 14336, 4096, 2)


def attention(multiprocessor: Multiprocessor) -> Cases:
    """Decodes, extends and prefills at the shapes of well-known models."""
    shape = partial(attention_shape, multiprocessor)
    usual = shape(128, 128, 8)
    yield "decode", partial(launch_split, usual)
    yield "decode small blocks", partial(launch_split, shape(128, 128, 4, 16))
    yield "decode fp8", partial(launch_split, shape(128, 128, 8, kv_dtype=FP8))
    yield "decode latent", partial(launch_split, shape(576, 512, 128))
    yield "decode flags", partial(launch_split, shape(64, 64, 8), window=128, flags=True)
    yield "extend", partial(launch_split, usual, tokens=8)
    yield "prefill", partial(launch_prefill, usual)
    yield "prefill small blocks", partial(launch_prefill, shape(80, 80, 4, 16))
    yield "prefill short", partial(launch_prefill, usual, max_query_len=40)
    yield "prefill flags", partial(launch_prefill, usual, window=128, flags=True)


def heads_of_128(multiprocessor: Multiprocessor) -> Cases:
    """What a service of Qwen3-30B-A3B launches: the sizes that came nearest to the limit of most cards."""
    return _of_heads(multiprocessor, 128, 128, BF16)


def served(multiprocessor: Multiprocessor) -> Cases:
    """Attention that a service can launch: heads of the usual sizes and latent attention, KV in 16 bits."""
    for key_dim, value_dim in SERVED_HEADS:
        yield from _of_heads(multiprocessor, key_dim, value_dim, BF16)


def served_fp8(multiprocessor: Multiprocessor) -> Cases:
    """The same with KV in fp8, which takes compute capability 8.9."""
    for key_dim, value_dim in SERVED_HEADS:
        yield from _of_heads(multiprocessor, key_dim, value_dim, FP8)


def _of_heads(multiprocessor: Multiprocessor, key_dim: int, value_dim: int, kv_dtype: torch.dtype) -> Cases:
    """Decodes, extends and prefills with every number of rows; heads of 128 in blocks of 16 too; equal ones once."""
    seen = set()
    groups = (16, 128) if key_dim > 256 else (1, 2, 8)
    for block_size, group in itertools.product((64, 16) if key_dim == 128 else (64,), groups):
        shape = attention_shape(multiprocessor, key_dim, value_dim, group, block_size, kv_dtype=kv_dtype)
        name = f"{key_dim} {kv_dtype} {block_size}".replace("torch.", "")
        for kind, config, launch in (
            ("decode", shape.split(), partial(launch_split, shape)),
            ("extend", shape.extend().split, partial(launch_split, shape, tokens=EXTEND_TOKENS)),
            ("short prompt", shape.prefill(1), partial(launch_prefill, shape, max_query_len=1)),
            (
                "prompt",
                shape.prefill(SHORT_QUERIES + 1),
                partial(launch_prefill, shape, max_query_len=SHORT_QUERIES + 1),
            ),
        ):
            if (kind, block_size, config) not in seen:
                seen.add((kind, block_size, config))
                yield f"{kind} {name} rows {config.rows}", launch


def attention_batches(multiprocessor: Multiprocessor) -> Cases:
    """One shape of attention with batches of all sizes."""
    case = attention_shape(multiprocessor, 64, 64, 8)
    for num_seqs, max_blocks, num_tokens, offset in ((1, 1, 1, 0), (2, 7, 17, 1), (16, 16, 64, 3), (33, 48, 1000, 0)):
        batch: dict[str, Any] = {
            "num_seqs": num_seqs,
            "max_blocks": max_blocks,
            "offset": offset,
            "window": 16 * num_seqs,
        }
        yield f"split {num_seqs}", partial(launch_split, case, **batch)
        yield f"prefill {num_seqs}", partial(launch_prefill, case, **batch, num_tokens=num_tokens)


def attention_table(multiprocessor: Multiprocessor) -> Cases:
    """The whole table of attention's configurations in 16 bits, and some of fp32: minutes."""
    sizes = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (576, 512))
    for key_dim, value_dim in sizes:
        for dtype, kv_dtype in ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP32, FP32)):
            if dtype == FP32 and key_dim > 256:
                continue
            for block_size in (16, 64):
                group = 16 if key_dim > 256 else 4
                case = attention_shape(multiprocessor, key_dim, value_dim, group, block_size, dtype, kv_dtype)
                name = f"{key_dim} {value_dim} {kv_dtype} {block_size}"
                yield f"decode {name}", partial(launch_split, case)
                yield f"extend {name}", partial(launch_split, case, tokens=8)
                yield f"prefill {name}", partial(launch_prefill, case)


def experts(multiprocessor: Multiprocessor) -> Cases:
    """Gate and experts at the shapes of Qwen3-30B-A3B and Mixtral; a name says stored format and tokens."""
    return _of_experts(
        multiprocessor,
        (MoeShape(*QWEN, "bfloat16"), (1, 64, 256, 1024)),
        (MoeShape(*MIXTRAL, "bfloat16"), (64,)),
        (MoeShape(*QWEN, "int8"), (1, 64)),
        (MoeShape(*QWEN, "int4", 128), (1, 64, 2048)),
        (MoeShape(*QWEN, "float32"), (64,)),
    )


def experts_fp8(multiprocessor: Multiprocessor) -> Cases:
    """Experts in fp8, which takes compute capability 8.9."""
    large = MoeShape(256, 2048, 7168, 8, "fp8")
    return _of_experts(multiprocessor, (large, (4,)), (MoeShape(*QWEN, "fp8"), (64, 2048)))


def _of_experts(multiprocessor: Multiprocessor, *sizes: tuple[MoeShape, tuple[int, ...]]) -> Cases:
    for shape, numbers in sizes:
        for num_tokens in numbers:
            yield f"{shape.weights} {num_tokens}", partial(launch_experts, shape, num_tokens, multiprocessor)


def packed_few(multiprocessor: Multiprocessor) -> Cases:
    """Dense products and experts of a Q4_K_M file, for prompts."""
    return (case for case in packed(multiprocessor) if case[0] in ("q4_k 512", "experts q4_k 2048"))


def packed(multiprocessor: Multiprocessor) -> Cases:
    """Products with quantised weights in the forms that services have most: dense ones, and those of experts."""
    for name in ("q4_k", "q6_k", "q8_0", "iq4_xs", "int4_f16", "fp8_128"):
        form = packed_form(FORMATS[name], 2048)
        rows = torch.empty(4096, form.row_bytes, dtype=torch.uint8, device=META)
        for num_tokens in (1, 512):
            x = torch.empty(num_tokens, 2048, dtype=BF16, device=META)
            yield f"{name} {num_tokens}", partial(multiply_rows, x, rows, form, None, BF16)
    down = packed_form(FORMATS["q6_k"], 768)
    for name, up in (("q4_k", packed_form(FORMATS["q4_k"], 2048)), ("mxfp4", packed_form(FORMATS["mxfp4"], 2048))):
        for num_tokens in (1, 256, 2048):
            yield (
                f"experts {name} {num_tokens}",
                partial(launch_experts, MoeShape(*QWEN, "packed"), num_tokens, multiprocessor, forms=(up, down)),
            )
    table = torch.empty(1000, down.row_bytes, dtype=torch.uint8, device=META)
    yield "table", lambda: look_up_packed(table, down, torch.zeros(3, dtype=torch.int64, device=META), BF16)


def in_fp8(multiprocessor: Multiprocessor) -> Cases:
    """Products with weights and activations in FP8, dense ones and those of experts, which take 8.9."""
    up, down = (packed_form(FORMATS["fp8_128"], depth, fp8_products=True) for depth in (2048, 768))
    rows = torch.empty(4096, up.row_bytes, dtype=torch.uint8, device=META)
    for num_tokens in (1, 512):
        x = torch.empty(num_tokens, 2048, dtype=BF16, device=META)
        yield f"fp8 in fp8 {num_tokens}", partial(multiply_rows, x, rows, up, None, BF16)
    for num_tokens in (1, 256, 2048):
        shape = MoeShape(*QWEN, "packed")
        launch = partial(launch_experts, shape, num_tokens, multiprocessor, forms=(up, down))
        yield f"experts fp8 in fp8 {num_tokens}", launch


def activations(multiprocessor: Multiprocessor) -> Cases:
    """Experts with the activations that change the products or the end of the kernel that has them."""
    shape = MoeShape(*QWEN, "bfloat16")
    for activation in (Activation("relu2"), Activation("silu", limit=10.0)):
        for num_tokens in (1, 64, 1024):
            yield (
                f"{activation.kind} {num_tokens}",
                partial(launch_experts, shape, num_tokens, multiprocessor, activation),
            )


def variants(multiprocessor: Multiprocessor) -> Cases:
    """Kernels that the benchmark compares and that serve nothing yet, at the shapes of Qwen3-30B-A3B."""
    rows = torch.ones(2)
    for logits in (torch.empty(2, 151936), torch.empty(2, 151936, dtype=BF16)):
        places, top_k = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
        yield (
            f"split filters {logits.dtype}",
            partial(keep_by_split_rows, logits, rows, places, places, top_k, rows, rows),
        )
    x, logits = torch.empty(4, 2048, dtype=BF16, device=META), torch.empty(4, 128, dtype=BF16, device=META)
    for weights in ("bfloat16", "int8"):
        shape = MoeShape(*QWEN, weights)
        experts = GpuExperts(matrix(shape, 2 * 768, 2048), matrix(shape, 2048, 768))
        launch = partial(few_rows_experts, x, logits, GateSpec(8, renormalise=True), experts, SILU)
        yield f"few rows {weights}", launch
        yield f"few rows {weights}, overlapping", partial(launch, overlaps=True)
    weight = torch.empty(5120, 2048, dtype=BF16, device=META)
    yield "norm and projection", partial(add_norm_linear, x, x, x[0], 1e-6, weight)
    yield "fused decode", partial(launch_fused, attention_shape(multiprocessor, 128, 128, 8))


def others(_: Multiprocessor) -> Cases:
    """Norms, rotation with KV write and sampling at the shapes of Qwen3-30B-A3B."""
    x, weight = torch.empty(2, 2048, dtype=BF16), torch.empty(2048, dtype=BF16)
    yield "rms_norm", lambda: rms_norm(x, weight, 1e-6)
    yield "add_rms_norm", lambda: add_rms_norm(x, x.clone(), weight, 1e-6)
    yield "layer_norm", lambda: layer_norm(x, weight, weight, 1e-6)
    wide = torch.empty(2, 7168, dtype=BF16)
    yield "rms_norm wide", lambda: rms_norm(wide, torch.empty(7168, dtype=BF16), 1e-6)
    yield "rope", launch_rope
    yield "rope interleaved partial", partial(launch_rope, interleaved=True, rotary=64)
    yield "rope fp8", partial(launch_rope, dtype=FP8)
    yield "rope fp8 scaled", partial(launch_rope, dtype=FP8, scaled=True)
    logits = torch.empty(2, 151936)
    yield "greedy", lambda: greedy(logits)
    yield "greedy bf16", lambda: greedy(logits.to(BF16))
    ones = torch.ones(2)
    places = torch.zeros(2, dtype=torch.int64)
    yield "sample", lambda: sample(logits, ones, places, places)
    top_k = torch.ones(2, dtype=torch.int32)
    yield "sample filtered", lambda: sample(logits, ones, places, places, top_k=top_k, top_p=ones, min_p=ones)


def recurrent(_: Multiprocessor) -> Cases:
    """The recurrent layers of Qwen3-Next-80B-A3B (Qwen3.5's too), Kimi-Linear-48B-A3B, Nemotron 3 Nano and Jamba."""
    heads = DeltaHeads(16, 32, 128, 128, torch.empty(32), torch.empty(32))
    rows = StateRows(torch.tensor([0, 1, 9]), torch.tensor([0, 1]), 8)
    projected = torch.empty(9, 8192 + 4096 + 64, dtype=BF16)
    qkv, gate, gates = projected.split([8192, 4096, 64], 1)
    weight, conv_states = torch.empty(4, 8192, dtype=BF16), torch.empty(2, 3, 8192, dtype=BF16)
    yield "convolution", lambda: short_conv(qkv, weight, conv_states, rows)
    states = torch.empty(2, 32, 128, 128)
    yield "delta rule", lambda: gated_delta_rule(qkv, gates, heads, states, rows)
    kimi = DeltaHeads(32, 32, 128, 128)
    heads_rows, decays = torch.empty(9, 3 * 4096, dtype=BF16), torch.empty(9, 32 * 129)
    yield "delta rule by channel", lambda: gated_delta_rule(heads_rows, decays, kimi, states, rows)
    each = torch.empty(64)
    mamba = MambaHeads(64, 8, 64, 128, each, each, each)
    xbc, mamba_states = torch.empty(9, sum(mamba.widths), dtype=BF16), torch.empty(2, 64, 128, 64)
    yield "Mamba 2", lambda: mamba2_scan(xbc, torch.empty(9, 64, dtype=BF16), mamba, mamba_states, rows)
    jamba, wide = (torch.empty(9, width, dtype=BF16) for width in (32, 8192))
    rate, jamba_states = torch.empty(16, 8192), torch.empty(2, 16, 8192)
    yield "Mamba 1", lambda: mamba1_scan(wide, wide.float(), jamba, rate, rate[0], jamba_states, rows)
    norm = torch.empty(128, dtype=BF16)
    yield "gated norm", lambda: gated_norm(torch.empty(9, 32, 128, dtype=BF16), gate, norm, 1e-6)


def benchmarked(multiprocessor: Multiprocessor) -> Cases:
    """Every configuration that the table and the heuristic choose for the shapes of the kernel benchmark: minutes.

    Configurations that several shapes share are compiled once.
    """
    from benchmarks.kernels.attention import attention_cases
    from benchmarks.kernels.experts import NUM_TOKENS, SHAPES

    seen: set[object] = set()
    config: object
    for case in attention_cases():
        dims = (case.key_dim, case.value_dim, case.group, case.block_size)
        shape = attention_shape(multiprocessor, *dims, case.dtype, case.kv_dtype)
        if case.kind == "prefill":
            config, call = shape.prefill(max(case.query_lens)), partial(launch_prefill, shape, max_query_len=1000)
        else:
            config = shape.split() if case.kind == "decode" else shape.extend()
            tokens = 1 if case.kind == "decode" else shape.extend().tokens_per_tile(shape.group)
            call = partial(launch_split, shape, tokens=tokens)
        if (case.kind, shape, config) not in seen:
            seen.add((case.kind, shape, config))
            yield case.name, call
    for name, layer in SHAPES.items():
        for num_tokens in NUM_TOKENS:
            config = config_for(layer, num_tokens, multiprocessor.shared_bytes, reads_tiles=multiprocessor.reads_tiles)
            if (name, config) not in seen:
                seen.add((name, config))
                yield f"{name} {num_tokens}", partial(launch_experts, layer, num_tokens, multiprocessor)


def attention_shape(
    multiprocessor: Multiprocessor,
    key_dim: int,
    value_dim: int,
    group: int,
    block_size: int = 64,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype = BF16,
) -> AttentionShape:
    """Latent attention, whose keys are larger than any others, has one KV head."""
    heads = 1 if key_dim > 256 else KV_HEADS
    return AttentionShape(heads * group, heads, key_dim, value_dim, block_size, dtype, kv_dtype, multiprocessor)


def launch_split(
    shape: AttentionShape,
    *,
    num_seqs: int = 3,
    max_blocks: int = 5,
    offset: int = 0,
    window: int | None = None,
    tokens: int = 1,
    flags: bool = False,
) -> None:
    """Make a work list, then compute the decode, or with `tokens` > 1 the short extend, that follows it."""
    config = shape.split(tokens)
    tokens = max(1, min(tokens, config.rows // shape.group))
    work = SplitWork(
        64, 64, 4096, shape.kv_heads, config, "cpu", num_sms=132, window=window, tokens_per_tile=tokens, max_query_len=8
    )
    table, lengths, starts = metadata(num_seqs, max_blocks, offset)
    query_starts = None if tokens == 1 else starts
    work.update(lengths, query_starts)
    split_attention(
        torch.empty((num_seqs, shape.num_heads, shape.key_dim), dtype=shape.dtype),
        PagedContext(*pools(shape), table, lengths, shape.block_size),
        work,
        Partials.allocate(work, shape.num_heads, shape.value_dim),
        scoring(shape.num_heads, flags),
        query_starts=query_starts,
    )


def launch_fused(shape: AttentionShape) -> None:
    """Launch the variant of decode attention that makes its heads itself, over three sequences."""
    table, lengths, _ = metadata(3, 5)
    work = SplitWork(64, 64, 4096, shape.kv_heads, shape.split(), "cpu", num_sms=132)
    q, kv = torch.empty(3, shape.num_heads, 128, dtype=BF16), torch.empty(3, shape.kv_heads, 128, dtype=BF16)
    angles, weight, slots = torch.empty(3, 64), torch.empty(128, dtype=BF16), torch.zeros(3, dtype=torch.int64)
    rotate_store_and_attend(
        NewHeads(q, kv, kv, angles, angles, slots, weight, weight, 1e-6),
        PagedContext(*pools(shape), table, lengths, shape.block_size),
        work,
        Partials.allocate(work, shape.num_heads, shape.value_dim),
        0.1,
    )


def launch_prefill(
    shape: AttentionShape,
    *,
    num_tokens: int = 100,
    num_seqs: int = 3,
    max_blocks: int = 5,
    offset: int = 0,
    window: int | None = None,
    max_query_len: int = 1000,
    flags: bool = False,
) -> None:
    table, lengths, starts = metadata(num_seqs, max_blocks, offset)
    prefill_attention(
        torch.empty((num_tokens, shape.num_heads, shape.key_dim), dtype=shape.dtype),
        PagedContext(*pools(shape), table, lengths, shape.block_size),
        starts,
        scoring(shape.num_heads, flags),
        shape.prefill(max_query_len),
        window=window,
    )


def pools(shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Values are a view of the keys in latent attention."""
    slots = (shape.kv_heads, 4 * shape.block_size)
    keys = torch.empty((*slots, shape.key_dim), dtype=shape.kv_dtype)
    if shape.key_dim > 256:
        return keys, keys[..., : shape.value_dim]
    return keys, torch.empty((*slots, shape.value_dim), dtype=shape.kv_dtype)


def metadata(num_seqs: int, max_blocks: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, lengths and starts; with an `offset` they lie within larger tensors, aligned to nothing."""
    table = torch.zeros((num_seqs + offset, max_blocks), dtype=torch.int32)
    lengths = torch.zeros(num_seqs + offset, dtype=torch.int32)
    starts = torch.zeros(num_seqs + offset + 1, dtype=torch.int32)
    return table[offset:], lengths[offset:], starts[offset:]


def scoring(num_heads: int, flags: bool) -> Scoring:
    """With `flags`, sinks and a soft cap."""
    return Scoring(0.1, soft_cap=30.0, sinks=torch.empty(num_heads)) if flags else Scoring(0.1)


def launch_experts(
    shape: MoeShape,
    num_tokens: int,
    multiprocessor: Multiprocessor,
    activation: Activation = SILU,
    forms: tuple[PackedForm, PackedForm] | None = None,
) -> None:
    """Run gate and experts with the tiles that serving chooses. forms: of packed matrices."""
    width, hidden, top_k = shape.intermediate_size, shape.hidden_size, shape.top_k
    dtype = FP32 if shape.weights == "float32" else BF16
    rows = 2 * width if activation.is_gated else width
    up, down = (None, None) if forms is None else forms
    matrices = GpuExperts(matrix(shape, rows, hidden, up), matrix(shape, hidden, width, down))
    workspace = MoeWorkspace.allocate(num_tokens, top_k, shape.num_experts, hidden, width, dtype, META)
    x = torch.empty(num_tokens, hidden, dtype=dtype, device=META)
    logits = torch.empty(num_tokens, shape.num_experts, dtype=dtype, device=META)
    ids, weights = select_experts(logits, GateSpec(top_k, renormalise=True))
    config = config_for(shape, num_tokens, multiprocessor.shared_bytes, reads_tiles=multiprocessor.reads_tiles)
    moe_experts(x, ids, weights, matrices, activation, config, workspace)


def matrix(shape: MoeShape, rows: int, depth: int, form: PackedForm | None = None) -> StoredMatrix:
    if form is not None:
        values = torch.empty(shape.num_experts, rows, form.row_bytes, dtype=torch.uint8, device=META)
        return StoredMatrix(values, form=form)
    if shape.weights == "int4":
        packed = torch.empty(shape.num_experts, rows, depth // 2, dtype=torch.uint8, device=META)
        return StoredMatrix(packed, torch.empty(shape.num_experts, depth // shape.group_size, rows, device=META))
    values = torch.empty(shape.num_experts, rows, depth, dtype=STORED[shape.weights], device=META)
    is_plain = shape.weights in ("bfloat16", "float32")
    return StoredMatrix(values, None if is_plain else torch.empty(shape.num_experts, rows, device=META))


def launch_rope(
    *, interleaved: bool = False, rotary: int = 128, dtype: torch.dtype = BF16, scaled: bool = False
) -> None:
    q, k, v = torch.empty(2, 40, 128, dtype=BF16).split([32, 4, 4], 1)
    keys, values = (torch.empty(4, 64, 128, dtype=dtype) for _ in range(2))
    scales: dict[str, Any] = {"k_scale": torch.ones(4), "v_scale": torch.ones(4)} if scaled else {}
    angles, weight = torch.empty(2, rotary // 2), torch.empty(128, dtype=BF16)
    slots = torch.zeros(2, dtype=torch.int64)
    weights: dict[str, Any] = {"q_weight": weight, "k_weight": weight}
    norm_rope_write_kv(q, k, v, angles, angles, slots, keys, values, interleaved=interleaved, **weights, **scales)
