"""`python -m benchmarks.beams`: the KV memory that beams save by sharing blocks, on the demo.

In each step the blocks that the beams of all searches name are counted, once each and once per beam. The share that is
saved is 1 - (sum of the first over all steps) / (sum of the second), as in the paper on PagedAttention (section 6.3).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import click
from tokenizers import Tokenizer

from benchmarks.token_engine import TokenEngine
from moeserve.config import ServeConfig
from moeserve.model.demo import ensure_demo
from moeserve.plan import BeamParams, Request, SamplingParams

WIDTHS = (2, 4, 6)
# Instructions of a sentence or two, as in the paper's trace of short prompts.
PROMPTS = (
    "Give three tips for staying healthy.",
    "What are the three primary colors?",
    "Describe the structure of an atom.",
    "How can we reduce air pollution?",
    "Describe a time when you had to make a difficult decision.",
    "Write a short story about a lighthouse keeper who finds a bottle on the beach.",
    "Explain why the sky is blue to a child, and then to a student of physics.",
    "Translate this sentence into French: the weather was fine when we left the harbour.",
)


@dataclass(slots=True)
class Blocks:
    """Counts of blocks, summed over steps: `distinct` once each, `named` once per beam."""

    distinct: int = 0
    named: int = 0

    @property
    def saved(self) -> float:
        """The share of memory that sharing saves."""
        return 1 - self.distinct / self.named


def measure(engine: TokenEngine, prompts: Sequence[array[int]], width: int, max_tokens: int) -> Blocks:
    """Search for a continuation of each prompt, all together, and count the blocks of the beams."""
    blocks = Blocks()
    leaders = [
        Request(f"{width}-{number}", prompt[:], SamplingParams(max_tokens), beam_params=BeamParams(width, 1))
        for number, prompt in enumerate(prompts)
    ]
    for leader in leaders:
        engine.scheduler.add(leader)
    while engine.steps.advance() is not None:
        for leader in leaders:
            tables = [beam.lease.block_ids for beam in leader.beams if beam.lease is not None]
            if not leader.finished and len(tables) == width:
                blocks.distinct += len(set().union(*tables))
                blocks.named += sum(map(len, tables))
    engine.scheduler.take_started()
    return blocks


@click.command()
@click.option("--max-tokens", default=64, show_default=True, help="of each answer")
@click.option("--block-size", default=16, show_default=True, help="tokens of a block")
def main(max_tokens: int, block_size: int) -> None:
    """Print a row for each width."""
    directory = ensure_demo()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [array("i", tokenizer.encode(text).ids) for text in PROMPTS]
    num_tokens = sum(map(len, prompts)) / len(prompts)
    click.echo(
        f"{len(prompts)} prompts of {num_tokens:.1f} tokens, {max_tokens} to come, blocks of {block_size} tokens"
    )
    config = ServeConfig(block_size=block_size, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024)
    engine = TokenEngine(directory, config)
    for width in WIDTHS:
        blocks = measure(engine, prompts, width, max_tokens)
        click.echo(f"{width} beams: {100 * blocks.saved:.1f} % saved ({blocks.distinct} of {blocks.named} block steps)")
    engine.close()


if __name__ == "__main__":
    main()
