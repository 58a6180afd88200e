"""Behaviour that stays while the code moves: tokens, bits of log probabilities and plans, recorded once and checked.

`python -m tests.behaviour.freeze record|check [--only PART ...]` goes through the outermost faces alone:
`TokenEngine` in a process of its own, `moeserve serve` over HTTP, the compiled kernels, and the plans of the
simulator's script. A part is `plans`, `kernels`, `cpu`, `ranks`, `gpu` (Triton's interpreter) or `demo`, or one of a
model, as `cpu/gpt_oss`. Every process has one thread, and the kernels of `--reproducible`. Where the weights that
transformers draws differ from the record, tokens alone are compared, and so it is with what numpy and torch compute,
where their arithmetic differs. The check says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from tests.behaviour.cases import MODELS, Record
from tests.behaviour.services import KERNELS, ROOT, demo_on_two_ranks, interpreted_gpu, two_ranks
from tests.support.forking import popen

FROZEN = Path(__file__).with_name("frozen.json")
PARTS = (
    "plans",
    "kernels",
    *(f"cpu/{model}" for model in MODELS),
    "demo/cpu",
    "demo/ranks",
    *(f"gpu/{model}" for model in MODELS),
    *(f"ranks/{model}" for model in MODELS),
)
_IN_PROCESS = ("plans", "kernels", "cpu")
# Of these numpy and torch compute a part: attention whose heads are no multiple of 16 wide, and the interpreter's GPU.
_OF_TORCH = ("gpu", "cpu/deepseek_v3-yarn", "ranks/deepseek_v3-yarn")
_ON_SERVICES = {"gpu": interpreted_gpu, "ranks": two_ranks}
_AT_ONCE = 2

Records = dict[str, Record]


def chosen_parts(only: Sequence[str]) -> list[str]:
    """Raise ValueError for a name that begins no part."""
    for name in only:
        if not any(_is_under(part, name) for part in PARTS):
            raise ValueError(f"{name} is no part: {', '.join(PARTS)}")
    return [part for part in PARTS if not only or any(_is_under(part, name) for name in only)]


def _is_under(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def measure(parts: Sequence[str]) -> dict[str, Any]:
    """The machine, the digests of the models' weights and the records of every case of the parts.

    A GPU that is there cannot be interpreted: those parts are left out. Raise RuntimeError for a part that fails.
    """
    models = [model for model in MODELS if any(part.endswith(f"/{model}") for part in parts)]
    in_process = [part for part in parts if part.partition("/")[0] in _IN_PROCESS or part == "demo/cpu"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_AT_ONCE) as pool:
        folder = Path(name)
        with _engine_process(folder, models, in_process) as engine:
            assert engine.stdout is not None
            found = json.loads(_next_line(engine))
            found["cases"] = {}
            waiting: list[Future[Records]] = [pool.submit(_engine_records, engine, len(in_process))]
            for part in parts:
                if part not in in_process and not (found["has_gpu"] and part.startswith("gpu/")):
                    waiting.append(pool.submit(_prefixed, part, _on_services(part, folder)))
            for future in as_completed(waiting):
                found["cases"] |= future.result()
    found["cases"] = {case: found["cases"][case] for case in sorted(found["cases"])}
    return found


def _engine_process(folder: Path, models: Sequence[str], parts: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.behaviour.in_process", str(folder), "--models", *models, "--parts", *parts]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | KERNELS
    return popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def _next_line(engine: subprocess.Popen[str]) -> str:
    """Logs go to the same place, but are no JSON."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith("{"):
            return line
    raise RuntimeError(f"The engine's process ended with status {engine.wait()}.")


def _engine_records(engine: subprocess.Popen[str], count: int) -> Records:
    records: Records = {}
    for _ in range(count):
        records |= json.loads(_next_line(engine))
    return records


def _on_services(part: str, folder: Path) -> Callable[[], Records]:
    work = folder / "services" / part
    if part == "demo/ranks":
        return partial(demo_on_two_ranks, work)
    kind, model = part.split("/")
    return partial(_ON_SERVICES[kind], folder, model, work)


def _prefixed(part: str, records: Callable[[], Records]) -> Records:
    return {f"{part}/{case}": record for case, record in records().items()}


def differences(frozen: dict[str, Any], found: dict[str, Any], parts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the differences, one line a case with its first one, and notes about cases that were not compared."""
    wrong, notes = [], []
    machines = [{key: of["machine"][key] for key in ("cpu", "arithmetic")} for of in (frozen, found)]
    same_machine = machines[0] == machines[1]
    of_torch = [part for part in _OF_TORCH if any(_is_under(one, part) or _is_under(part, one) for one in parts)]
    if not same_machine and of_torch:
        notes.append(
            f"tokens only of {', '.join(of_torch)}: recorded on {frozen['machine']}, this is {found['machine']}"
        )
    other_weights = {name for name, digest in found["weights"].items() if frozen["weights"].get(name) != digest}
    notes += [f"tokens only of {name}: this machine draws other weights" for name in sorted(other_weights)]
    if found["has_gpu"] and any(part.startswith("gpu/") for part in parts):
        notes.append("gpu left out: a GPU that is there is not interpreted")
        parts = [part for part in parts if not part.startswith("gpu/")]
    expected = {case: record for case, record in frozen["cases"].items() if any(_is_under(case, p) for p in parts)}
    for case in sorted(expected.keys() | found["cases"].keys()):
        if case not in expected or case not in found["cases"]:
            wrong.append(f"{case}: {'not recorded yet' if case not in expected else 'gave nothing'}")
            continue
        exact = same_machine or not any(_is_under(case, part) for part in of_torch)
        exact = exact and other_weights.isdisjoint(case.split("/"))
        if not exact and case.endswith("/bfloat16"):
            # The rounding to 16 bits depends on the order of sums, and tokens follow.
            continue
        line = first_difference(expected[case], found["cases"][case], exact)
        if line is not None:
            wrong.append(f"{case}: {line}")
    return wrong, notes


def first_difference(frozen: Record, found: Record, exact: bool) -> str | None:
    """exact: bits too, if they were recorded. They are compared after tokens, so that a token that changed is said
    first."""
    for field in ("plans", "tokens", "cached", *(["bits"] if exact and "bits" in frozen else [])):
        old, new = frozen.get(field, []), found.get(field, [])
        for number, (before, after) in enumerate(zip(old, new, strict=False)):
            line = None if before == after else _first_place(field, before, after)
            if line is not None:
                return f"{'script' if field == 'plans' else 'prompt'} {number}, {line}"
        if len(old) != len(new):
            return f"{len(old)} lists of {field} became {len(new)}"
    return None


def _first_place(field: str, before: Any, after: Any) -> str:
    """Bits and plans are words of one string, tokens a list, and a number of cached tokens is one."""
    if field == "cached":
        return f"cached tokens: were {before}, are {after}"
    old, new = (values.split() if isinstance(values, str) else values for values in (before, after))
    for place, (was, is_now) in enumerate(zip(old, new, strict=False)):
        if was != is_now:
            at = f"plan {place}" if field == "plans" else f"token {place}"
            return f"{at}: {'bytes' if field == 'plans' else field} were {was}, are {is_now}"
    return f"{field}: {len(old)} became {len(new)}"


def write(found: dict[str, Any], parts: Sequence[str], frozen: dict[str, Any] | None) -> None:
    """One line a case; the cases of other parts stay. Raise ValueError where they are of another machine, but for plans
    and kernels."""
    weights, cases = found["weights"], found["cases"]
    if frozen is not None and len(parts) < len(PARTS):
        if not set(parts) <= {"plans", "kernels"} and frozen["machine"] != found["machine"]:
            raise ValueError("The other parts were recorded on another machine: record all of them.")
        kept = {case: record for case, record in frozen["cases"].items() if not any(_is_under(case, p) for p in parts)}
        weights, cases = frozen["weights"] | weights, kept | cases
    machine = found["machine"] if frozen is None or len(parts) == len(PARTS) else frozen["machine"]
    lines = [f"  {json.dumps(case)}: {json.dumps(cases[case], ensure_ascii=False)}" for case in sorted(cases)]
    heads = [f'"{key}": {json.dumps(value)}' for key, value in (("machine", machine), ("weights", weights))]
    FROZEN.write_text("{\n" + ",\n".join([*heads, '"cases": {\n' + ",\n".join(lines) + "\n}"]) + "\n}\n")


def check(only: Sequence[str]) -> tuple[list[str], list[str]]:
    """Differences and notes, see `differences`."""
    parts = chosen_parts(only)
    return differences(json.loads(FROZEN.read_text()), measure(parts), parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    arguments = parser.parse_args()
    if arguments.command == "record":
        parts = chosen_parts(arguments.only)
        write(measure(parts), parts, json.loads(FROZEN.read_text()) if FROZEN.exists() else None)
        return 0
    wrong, notes = check(arguments.only)
    print("\n".join([*notes, *wrong, f"{len(wrong)} cases differ" if wrong else "all as recorded"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
