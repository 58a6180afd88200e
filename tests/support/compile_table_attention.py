"""All of the attention kernels' table of configurations in 16 bits, and some of fp32, for `compile_only`: minutes."""

from functools import partial

import torch

from tests.support.attention_launches import launch_prefill, launch_split, shape

DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.float32),
)


def calls():
    for key_dim, value_dim in (
        (64, 64),
        (80, 80),
        (96, 96),
        (112, 112),
        (128, 128),
        (192, 128),
        (256, 256),
        (576, 512),
    ):
        for dtype, kv_dtype in DTYPES:
            if dtype == torch.float32 and key_dim > 256:
                continue
            for block_size in (16, 64):
                of = shape(key_dim, value_dim, 16 if key_dim > 256 else 4, block_size, dtype, kv_dtype)
                name = f"{key_dim} {value_dim} {kv_dtype} {block_size}"
                yield f"decode {name}", partial(launch_split, of)
                yield f"extend {name}", partial(launch_split, of, tokens=8)
                yield f"prefill {name}", partial(launch_prefill, of)
