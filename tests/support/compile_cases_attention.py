"""Attention at the shapes of well-known models, for `compile_only`."""

from functools import partial

import torch

from tests.support.attention_launches import launch_prefill, launch_split, shape

FP8, FP32 = torch.float8_e4m3fn, torch.float32


def calls():
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
