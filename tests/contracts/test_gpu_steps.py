"""The host waits for a GPU where a step's result is read, and nowhere before: no code that queues a step may wait.

On a CPU, under Triton's interpreter, such a wait takes no time and shows in no test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# They make a step's batch, or change blocks before it.
_QUEUE = ("moeserve/model/gpu/batches.py", "moeserve/model/gpu/shaped_batches.py", "moeserve/model/kv_pool.py")
_QUEUE += ("moeserve/model/state_pool.py", "moeserve/model/sampler.py", "kernels/transfer.py")
# A graph records them.
_CAPTURED = ("decoder", "delta_net", "layer_inputs", "mamba", "norms_over_ranks", "rope", "shared_keys", "short_conv")
_WAITING = {"item", "cpu", "nonzero", "unique", "masked_select", "synchronize"}


def calls_in_steps(path: Path) -> Iterator[ast.Call]:
    """Yield the calls of a module outside of references, which only tests call."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_reference"):
            continue
        if isinstance(node, ast.Call):
            yield node
        pending += ast.iter_child_nodes(node)


def places(found: Iterator[tuple[Path, ast.Call]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}" for path, call in found]


def test_numbers_of_the_host_reach_a_gpu_by_kernels_transfer_which_queues_copies_from_page_locked_memory() -> None:
    # torch.tensor(..., device=...) copies from memory that is not locked, for which CUDA waits for all that is queued.
    made = (
        (ROOT / name, call)
        for name in _QUEUE
        for call in calls_in_steps(ROOT / name)
        if ast.unparse(call.func) in ("torch.tensor", "torch.as_tensor")
        and any(keyword.arg == "device" for keyword in call.keywords)
    )
    assert not places(made)


def test_what_a_graph_records_reads_nothing_back_from_the_gpu() -> None:
    files = [ROOT / "moeserve" / "model" / f"{name}.py" for name in _CAPTURED]
    files += sorted((ROOT / "kernels" / "gpu").glob("*.py"))
    read = (
        (path, call)
        for path in files
        for call in calls_in_steps(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _WAITING
    )
    assert not places(read)
