"""Prints a digest of every plan of a fixed busy script: `python -m tests.support.plan_script DEPTH`."""

from __future__ import annotations

import sys
from hashlib import sha256
from random import Random

from moeserve.engine.ranks.plan_link import PlanSender
from moeserve.plan import SamplingParams
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation


def digests(depth: int) -> list[str]:
    random = Random("fcfs")
    simulation = Simulation(num_blocks=24, block_size=4, budget=11, max_num_seqs=5, depth=depth)
    shared = [random.randrange(VOCAB_SIZE) for _ in range(30)]
    for number in range(150):
        if number % 3 == 0:
            prompt = [*shared[: random.randrange(1, 30)], *(random.randrange(4) for _ in range(4))]
            sampling = SamplingParams(
                max_tokens=random.randrange(1, 25),
                seed=number,
                presence_penalty=0.5 * (number % 2),
                logit_bias={7: 1.0, 3: -1.0} if number % 4 == 0 else None,
                min_tokens=number % 5,
                stop_token_ids=(1, 2),
            )
            namespace = random.choice(["", "tenant", "tenant é"])
            simulation.add(f"request {number}", prompt, sampling, namespace=namespace, priority=number % 2)
        if number % 10 == 9:
            simulation.abort(random.choice(list(simulation.records)))
        simulation.step()
    simulation.run_and_check()
    counters = simulation.scheduler.counters
    assert counters.preemptions > 0
    assert counters.prefix_hit_tokens > 0
    return [sha256(PlanSender().encode(plan)).hexdigest() for plan in simulation.plans]


if __name__ == "__main__":
    print("\n".join(digests(int(sys.argv[1]))))
