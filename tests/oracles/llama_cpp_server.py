"""Serve a GGUF file by llama.cpp on a port of this machine: FILE PORT. It runs where `xllamacpp` is installed."""

import signal
import sys

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.port = sys.argv[1], int(sys.argv[2])
parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = 256, 1, 0
parameters.cpuparams.n_threads, parameters.warmup = 1, False
# Numbers are compared: nothing is kept in 16 bits.
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(parameters)
signal.pause()
