"""What a kernel benchmark has found, in a file beside its report, so that another run can go on where one ended."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moeserve.bench.kernel_measurement import Measurement, PeerTime


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The row of a case. found: None where it failed."""

    row: str
    found: Measurement | None

    @property
    def is_right(self) -> bool:
        return self.found is not None and self.found.is_right


@dataclass(slots=True)
class Results:
    """of: what they hold for, as versions and the device. checks: what the report says of them, empty until then."""

    of: str
    cases: dict[str, CaseResult] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    checks_right: bool = True

    def write(self, path: Path) -> None:
        """Raises OSError."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path, of: str) -> Results:
        """Those of the file; none if there is no such file, or one that is broken or holds for something else."""
        try:
            fields = json.loads(path.read_text())
            cases = {
                name: CaseResult(case["row"], _measurement(case["found"])) for name, case in fields["cases"].items()
            }
            found = Results(fields["of"], cases, list(fields["checks"]), bool(fields["checks_right"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Results(of)
        return found if found.of == of else Results(of)


def _measurement(fields: dict[str, Any] | None) -> Measurement | None:
    if fields is None:
        return None
    peers = {name: PeerTime(**peer) for name, peer in fields["peers"].items()}
    return Measurement(**{**fields, "peers": peers})


def write_whole(path: Path, text: str) -> None:
    """In one move: whoever is cut off here leaves the previous text. Raises OSError."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    os.replace(beside, path)
