"""Service level objectives: which requests were served well enough. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moeserve.bench.measurement import RequestRecord

_UNITS = {"ms": 1e-3, "s": 1.0}
_LIMIT = re.compile(r"(ttft|tpot|e2e):([0-9]*\.?[0-9]+)(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in seconds on the time to first token, the time per output token and the whole request."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads `ttft:500ms,tpot:100ms,e2e:5s`, any of them. Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = _LIMIT.fullmatch(part.strip())
            if match is None:
                raise ValueError(f"{part.strip()!r} is not like ttft:500ms, tpot:100ms or e2e:5s")
            if match[1] in limits:
                raise ValueError(f"{match[1]} is given twice")
            limits[match[1]] = float(match[2]) * _UNITS[match[3]]
        return cls(**limits)

    def met(self, record: RequestRecord) -> bool:
        """A failed request meets nothing; a request of one token has no time per output token to miss."""
        if record.error is not None:
            return False
        measured = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e))
        return all(limit is None or value is None or value <= limit for limit, value in measured)
