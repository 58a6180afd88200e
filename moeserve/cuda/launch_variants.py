"""Which kernel variants a step launches, and the steps that launch all of them, so that none is compiled while serving.

What a kernel is compiled for must follow from the model, the device and the few choices named here. Numbers that vary
from step to step (tokens, sequences, table widths) are arguments that Triton does not specialise on. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from moeserve.cuda.step_arrays import ExtendLimits, share_prompts

# Of a number of new tokens: what makes one configuration of kernels differ from another.
Choice = Callable[[int], Hashable]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sequences with one new token each, then prompts. The logits of `num_logits` rows, the last ones, are wanted."""

    num_decodes: int
    prompt_lens: tuple[int, ...]
    num_logits: int

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.prompt_lens)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What no step exceeds: tokens, sequences, tokens of one sequence."""

    max_tokens: int
    max_seqs: int
    max_len: int


class LaunchVariants:
    """The variants of attention and experts that steps of a model launch, of those that are not captured.

    prefill: by the longest prompt of a step that is no short extend. experts: by its rows, None for a model without
    any. extends: which prompts are short extends, None for none. sparse_layers: which layers have experts.
    """

    def __init__(
        self,
        limits: StepLimits,
        prefill: Choice,
        experts: Choice | None,
        extends: ExtendLimits | None,
        sparse_layers: Sequence[bool],
    ) -> None:
        self._limits, self._prefill, self._experts, self._extends = limits, prefill, experts, extends
        self._meet_all, self._meet_wanted = any(sparse_layers[:-1]), sparse_layers[-1]

    def of_step(self, shape: StepShape) -> frozenset[Hashable]:
        """What a step launches. Experts of the last layer meet only rows whose logits are wanted."""
        found: set[Hashable] = set()
        if shape.num_decodes:
            found.add("decode")
        run, longest = share_prompts(shape.prompt_lens, self._extends)
        if run is not None:
            found.add("extend")
        if longest:
            found.add(("prefill", self._prefill(longest)))
        if self._experts is not None:
            numbers = (shape.num_tokens * self._meet_all, shape.num_logits * self._meet_wanted)
            found |= {("experts", self._experts(rows)) for rows in numbers if rows}
        return frozenset(found)

    def all(self) -> frozenset[Hashable]:
        """What steps within the limits launch between them."""
        return frozenset().union(*(self.of_step(shape) for shape in self._simple_steps()))

    def steps(self) -> list[StepShape]:
        """Few steps that launch `all` between them, the largest first."""
        missing = set(self.all())
        chosen = []
        for shape in sorted(self._simple_steps(), key=lambda shape: -shape.num_tokens):
            launched = self.of_step(shape)
            if launched & missing:
                missing -= launched
                chosen.append(shape)
        return chosen

    def _simple_steps(self) -> Iterator[StepShape]:
        """One decode, and prompts of every number of tokens, as long as can be: every choice depends on one number.

        And as many prompts as can be, of one token each: more than are computed as short extends. Where experts meet
        wanted rows alone, all rows are.
        """
        limits = self._limits
        yield StepShape(1, (), 1)
        most = min(limits.max_seqs, limits.max_tokens)
        yield StepShape(0, (1,) * most, most)
        for num_tokens in range(1, limits.max_tokens + 1):
            whole, rest = divmod(num_tokens, limits.max_len)
            lengths = (limits.max_len,) * whole + ((rest,) if rest else ())
            if len(lengths) <= limits.max_seqs:
                yield StepShape(0, lengths, len(lengths) if self._meet_all else num_tokens)
