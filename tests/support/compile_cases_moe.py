"""Gate and experts at the shapes of Qwen3-30B-A3B and Mixtral, for `compile_only`. Tensors have no memory."""

import torch

from kernels.gpu.moe import MoeWorkspace, moe_experts
from kernels.gpu.moe_config import Device, MoeShape, heuristic_config
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from kernels.specs import Activation, GateSpec

HOPPER = Device(shared_bytes=227 << 10, num_multiprocessors=132, has_descriptors=True)
META = torch.device("meta")
STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
QWEN = (128, 768, 2048, 8)
MIXTRAL = (8, 14336, 4096, 2)
CASES = [
    (MoeShape(*QWEN, "bfloat16"), (1, 64, 256, 1024)),
    (MoeShape(*MIXTRAL, "bfloat16"), (64,)),
    (MoeShape(*QWEN, "int8"), (1, 64)),
    (MoeShape(256, 2048, 7168, 8, "fp8"), (4,)),
    (MoeShape(*QWEN, "fp8"), (64, 2048)),
    (MoeShape(*QWEN, "int4", 128), (1, 64, 2048)),
    (MoeShape(*QWEN, "float32"), (64,)),
]


def matrix(shape: MoeShape, rows: int, depth: int) -> StoredMatrix:
    if shape.weights == "int4":
        packed = torch.empty(shape.num_experts, rows, depth // 2, dtype=torch.uint8, device=META)
        return StoredMatrix(packed, torch.empty(shape.num_experts, depth // shape.group_size, rows, device=META))
    values = torch.empty(shape.num_experts, rows, depth, dtype=STORED[shape.weights], device=META)
    is_plain = shape.weights in ("bfloat16", "float32")
    return StoredMatrix(values, None if is_plain else torch.empty(shape.num_experts, rows, device=META))


def experts_call(shape: MoeShape, num_tokens: int):
    """The variant that the heuristic chooses, and a function that runs the gate and the experts with it."""
    width, hidden, top_k = shape.intermediate_size, shape.hidden_size, shape.top_k
    dtype = torch.float32 if shape.weights == "float32" else torch.bfloat16
    experts = GpuExperts(matrix(shape, 2 * width, hidden), matrix(shape, hidden, width))
    workspace = MoeWorkspace.allocate(num_tokens, top_k, shape.num_experts, hidden, width, dtype, META)
    x = torch.empty(num_tokens, hidden, dtype=dtype, device=META)
    logits = torch.empty(num_tokens, shape.num_experts, dtype=dtype, device=META)
    config = heuristic_config(shape, num_tokens, HOPPER)

    def call():
        ids, weights = select_experts(logits, GateSpec(top_k, renormalise=True))
        moe_experts(x, ids, weights, experts, Activation(), config, workspace, num_programs=132)

    return config.variant, call


def calls():
    for shape, sizes in CASES:
        for num_tokens in sizes:
            variant, call = experts_call(shape, num_tokens)
            yield f"{variant} {shape.weights} {num_tokens}", call
