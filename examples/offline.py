"""Prompts answered in a script, without a server. The model is the first argument; without it, the demo."""

import sys

from moeserve import LLM

PROMPTS = ["The capital of France is", "Water boils at", "A mixture of experts is"]

# Keyword arguments are the settings of `moeserve serve`.
with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo", kv_cache_memory="1GiB") as llm:
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, max_tokens=16, temperature=0), strict=True):
        print(f"{prompt!r} -> {answer.text!r}")
