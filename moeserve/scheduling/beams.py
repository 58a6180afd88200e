"""The beams of requests that search with beams: requests of their own, which share the blocks of their common text.

A beam that two continuations follow is forked: full blocks are shared, the last one is copied. If memory for the copy
is short, the new beam computes its last tokens again, as a preempted request does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from moeserve.plan import ChunkResult, FinishReason, Request, SamplingParams
from moeserve.scheduling.beam_search import Beam, BeamSearch
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.plan_draft import PlanDraft
from moeserve.scheduling.request_memory import RequestMemory
from radix_cache import Fork

_Likeliest = Sequence[tuple[int, float]]


@dataclass(slots=True)
class _Group:
    """A search and its requests. `likeliest`: the next tokens of its beams, by their ids, as far as they are known.

    `forks`: the forks whose copies no plan has made yet. `num_made`: the beams that were made so far.
    """

    leader: Request
    search: BeamSearch
    likeliest: dict[str, _Likeliest] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    num_made: int = 0


class Beams:
    """The searches of all requests with `beam_params`, waiting or running."""

    def __init__(self, memories: Sequence[RequestMemory], max_num_seqs: int, rope_switch: int | None) -> None:
        """memories: by rank. rope_switch: see `Scheduler`."""
        self._memories = memories
        self._max_num_seqs = max_num_seqs
        self._rope_switch = rope_switch
        self._groups: dict[str, _Group] = {}

    def enter(self, leader: Request) -> None:
        """Begin the search of a new request. Raise ValueError if it can not be carried out."""
        params, sampling = leader.beam_params, leader.sampling
        assert params is not None
        if params.width > self._max_num_seqs:
            raise ValueError(f"a search with {params.width} beams needs more than the {self._max_num_seqs} places")
        max_tokens, switch = sampling.max_tokens, self._rope_switch
        if switch is not None and leader.num_prompt_tokens <= switch:
            # Beams share blocks, so their angles must not change: the context of a search ends there.
            max_tokens = min(max_tokens, switch - leader.num_prompt_tokens)
            if not max_tokens:
                raise ValueError(f"a beam search cannot go on at {switch} tokens, where angles change")
        num_tokens = leader.num_prompt_tokens + max_tokens
        for memory in self._memories:
            memory.check_beams(leader.num_prompt_tokens, num_tokens, params.width)
        search = BeamSearch(
            params, max_tokens=max_tokens, min_tokens=sampling.min_tokens, stop_token_ids=sampling.stop_token_ids
        )
        self._groups[leader.request_id] = _Group(leader, search)
        # A search goes by log probabilities alone, whatever a checkpoint has for sampling.
        stops = sampling.stop_token_ids
        leader.sampling = SamplingParams(max_tokens, 0.0, logprobs=search.num_alternatives, stop_token_ids=stops)

    def take(self, request: Request, computed: ChunkResult) -> list[RequestOutput]:
        """Receive the result of a chunk of a leader or a beam. Return the end of the search if it has come.

        Once the next tokens of all beams are known, `leader.beams` holds the beams that go on.
        """
        leader = request.leader or request
        group = self._groups[leader.request_id]
        # A leader that was preempted computes its prompt again for beams that exist.
        if computed.logprobs is None or (request is leader and leader.beams):
            return []
        group.likeliest[request.request_id] = computed.logprobs.top
        present = leader.beams or [leader]
        if len(group.likeliest) < len(present):
            return []
        group.search.advance([group.likeliest.pop(beam.request_id) for beam in present])
        if not group.search.is_done:
            self._go_on(group)
            return []
        found = group.search.best()
        assert leader.beam_params is not None
        if len(found) < leader.beam_params.num_answers:
            return [RequestOutput(leader, finish_reason=FinishReason.ERROR, error="too few texts were found")]
        return [RequestOutput(leader, finish_reason=found[0].finish_reason, found=found)]

    def attach(self, beam: Request) -> None:
        """Lease the cached blocks of a beam without a lease, on the rank where its leader is now."""
        if beam.lease is None:
            assert beam.leader is not None
            beam.rank = beam.leader.rank
            self._memories[beam.rank].attach(beam)

    def plan_copies(self, draft: PlanDraft) -> None:
        """Add the blocks of beams that were forked since the last step to the copies of the step in `draft`."""
        for group in self._groups.values():
            for fork in group.forks:
                draft.copy(group.leader.rank, fork.copies, fork.window_copies)
            group.forks.clear()

    def detach(self, leader: Request) -> None:
        """Release the memory of the beams of a preempted leader; no plan in flight names them."""
        group = self._groups[leader.request_id]
        group.likeliest.clear()
        group.forks.clear()
        for beam in leader.beams:
            if beam.lease is not None:
                self._memories[leader.rank].detach(beam)

    def forget(self, leader: Request) -> list[Request]:
        """Forget the search of a request that has ended. Return its beams that have leases, marked as ended."""
        del self._groups[leader.request_id]
        for beam in leader.beams:
            beam.finished, beam.failed = True, leader.failed
        return [beam for beam in leader.beams if beam.lease is not None]

    def _go_on(self, group: _Group) -> None:
        """Give each beam of the search a request: the request of the beam that it continues, or a fork of it."""
        leader, memory = group.leader, self._memories[group.leader.rank]
        before, free = leader.beams or [leader], set[int]()
        if leader.beams:
            free = {beam.parent for beam in group.search.beams}
            for number, ended in enumerate(before):
                if number not in free:
                    memory.detach(ended)
        after = []
        for beam in group.search.beams:
            parent = before[beam.parent]
            if beam.parent in free:
                free.remove(beam.parent)
                parent.token_ids.append(beam.token_ids[-1])
                after.append(parent)
            else:
                after.append(self._forked(group, parent, beam))
        leader.beams[:] = after

    def _forked(self, group: _Group, parent: Request, beam: Beam) -> Request:
        """Return a new request for a beam that continues the text of `parent`."""
        leader = group.leader
        group.num_made += 1
        child = Request(
            f"{leader.request_id}/{group.num_made}",
            leader.token_ids[: leader.num_prompt_tokens],
            leader.sampling,
            leader.namespace,
            leader.priority,
            arrival=leader.arrival,
            rank=leader.rank,
            first_angle=leader.first_angle,
            terms=leader.terms,
            arrived_at=leader.arrived_at,
            earlier_output=array("i", beam.token_ids),
            leader=leader,
        )
        fork = self._memories[leader.rank].fork(parent, child)
        if fork is not None:
            group.forks.append(fork)
        return child
