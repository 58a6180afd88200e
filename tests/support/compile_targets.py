"""Every configuration that the table and the heuristic choose for the shapes of the kernel benchmark, for
`compile_only`: minutes. Configurations that several shapes share are compiled once."""

from functools import partial

from benchmarks.kernels.attention import attention_cases
from benchmarks.kernels.experts import NUM_TOKENS, SHAPES
from tests.support.attention_launches import launch_prefill, launch_split
from tests.support.compile_cases_moe import HOPPER, experts_call, heuristic_config


def calls():
    seen = set()
    for case in attention_cases():
        shape = case.shape
        of = (case.key_dim, case.value_dim, shape.group, case.block_size, case.dtype, case.kv_dtype)
        if case.kind == "prefill":
            config, call = shape.prefill(max(case.query_lens)), partial(launch_prefill, of, max_query_len=1000)
        else:
            config = shape.split() if case.kind == "decode" else shape.extend()
            tokens = 1 if case.kind == "decode" else shape.extend().tokens_per_tile(shape.group)
            call = partial(launch_split, of, tokens=tokens)
        if (case.kind, of, config) not in seen:
            seen.add((case.kind, of, config))
            yield case.name, call
    for name, shape in SHAPES.items():
        for num_tokens in NUM_TOKENS:
            config = heuristic_config(shape, num_tokens, HOPPER)
            if (name, config) not in seen:
                seen.add((name, config))
                yield f"{name} {num_tokens}", experts_call(shape, num_tokens)[1]
