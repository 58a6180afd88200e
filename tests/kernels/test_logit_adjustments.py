"""Penalties, biases and bans give each row the same bits in a batch as alone."""

import random
from array import array
from dataclasses import replace

import pytest
import torch

from moeserve.model.sampler import adjusted_logits
from moeserve.plan import Chunk, ChunkExtras, SamplingParams

VOCAB = 50


def chunk(sampling, history=None, num_prompt=0, banned=()):
    extras = None
    if history is not None or banned:
        extras = ChunkExtras(None if history is None else array("i", history), num_prompt, banned)
    return Chunk("", array("i", [1]), 0, array("i", [0]), sampling, extras)


def random_chunk(draw):
    penalties = {
        "presence_penalty": draw.choice((0.0, 0.7, -1.5)),
        "frequency_penalty": draw.choice((0.0, 0.3, -0.2)),
        "repetition_penalty": draw.choice((1.0, 1.3, 0.6)),
    }
    bias = {token: draw.uniform(-5, 5) for token in draw.sample(range(VOCAB), draw.randrange(4))}
    sampling = SamplingParams(max_tokens=4, temperature=1.0, logit_bias=bias or None, **penalties)
    history = draw.choices(range(VOCAB), k=draw.randrange(1, 90)) if draw.random() < 0.7 else None
    num_prompt = draw.randrange(len(history) + 1) if history else 0
    banned = tuple(draw.sample(range(VOCAB), draw.randrange(3)))
    return chunk(sampling, history, num_prompt, banned)


def row_by_row(logits, chunks):
    """By the definitions, one token after another."""
    adjusted = logits.float().clone()
    for row, one in zip(adjusted, chunks, strict=True):
        sampling, history = one.sampling, (one.extras and one.extras.history) or ()
        repetition = torch.tensor(sampling.repetition_penalty)
        for token in set(history):
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
            count = list(history[one.extras.num_prompt_tokens :]).count(token)
            if count:
                row[token] -= sampling.presence_penalty + sampling.frequency_penalty * torch.tensor(float(count))
        for token, bias in (sampling.logit_bias or {}).items():
            row[token] += bias
        for token in one.extras.banned_token_ids if one.extras else ():
            row[token] = -torch.inf
    return adjusted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_all_rows_together_have_the_bits_of_each_alone(num_rows, dtype, device):
    draw = random.Random(num_rows)
    chunks = [random_chunk(draw) for _ in range(num_rows)]
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = logits.clone()
    found = adjusted_logits(logits.to(device), chunks).cpu()
    assert torch.equal(found, row_by_row(logits, chunks))
    assert torch.equal(logits, before)


def test_a_token_that_only_the_device_knows_counts_as_if_it_were_in_the_history(device):
    draw = random.Random(9)
    known = [random_chunk(draw) for _ in range(40)]
    previous, chunks = torch.tensor([draw.randrange(VOCAB) for _ in range(len(known))]), []
    for row, one in enumerate(known):
        late = replace(one)
        if one.extras is not None and one.extras.history is not None and row % 3:
            # The history so far, and beside it what the sampled chunk number `row` of the step before has drawn.
            late = replace(one, drawn_by=row)
            one.extras = replace(one.extras, history=one.extras.history + array("i", [int(previous[row])]))
        chunks.append(late)
    assert any(one.drawn_by is not None for one in chunks)
    logits = torch.randn(len(known), VOCAB, generator=torch.Generator().manual_seed(4))
    found = adjusted_logits(logits.to(device), chunks, previous.to(device)).cpu()
    assert torch.equal(found, row_by_row(logits, known))
    with pytest.raises(ValueError, match="there is none"):
        adjusted_logits(logits.to(device), chunks)


def test_where_nobody_wishes_anything_nothing_is_copied(device):
    logits = torch.zeros(2, VOCAB, device=device)
    assert adjusted_logits(logits, [chunk(SamplingParams(max_tokens=1))] * 2) is logits
