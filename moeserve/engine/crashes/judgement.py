"""Decides which requests the next engine suspects of having ended the previous one. Pure: it knows no clock, process or
file.

Only requests that a dead engine was working on are suspects. The next engine has one of them at most in its steps until
it is beyond the place where it was (`Scheduler`). So an engine that dies all the same has identified the culprit.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.wire import Suspicion

# Work that ended engines is refused for 90 s: an engine that has served for a minute begins a new count of restarts
# (`launcher.life`), which a repeated request cannot use up then.
_CULPRIT_SECONDS = 90.0
_MAX_CULPRITS = 16
WORK = "work"  # begins the names of suspects that are known by their work


@dataclass(frozen=True)
class LastWork:
    """The work of an engine when it died.

    `named`: the requests in its steps in flight, and the one that it was just taking, with the number of tokens that
    would then have been computed. `trials`: the id and the digest of each suspect among them. `suspects`: all that had
    not passed.
    """

    named: dict[str, int]
    trials: list[tuple[str, str]]
    suspects: dict[str, int]


def name_of_work(digest: str) -> str:
    """Return the name of a suspect whose client left: requests are known again by their work, not by their ids."""
    return f"{WORK} {digest}"


def suspicion_after(before: Suspicion, last: LastWork | None, *, from_outside: bool, now: float) -> Suspicion:
    """Return the suspicions of the next engine.

    before: the suspicions of the dead one. last: None if it died before it worked. from_outside: no request can have
    caused its death. now: on the clock of `Suspicion.culprits`.
    """
    culprits = tuple((digest, until) for digest, until in before.culprits if now < until)
    if last is None:
        return Suspicion(before.places, culprits)
    if from_outside:
        return Suspicion(last.suspects, culprits)
    # With steps planned ahead a trial may still be named whose suspect has passed since.
    names = [({request_id, name_of_work(digest)}, digest) for request_id, digest in last.trials]
    guilty = [(own, digest) for own, digest in names if not own.isdisjoint(last.suspects)]
    if not guilty:
        return Suspicion(last.suspects | last.named, culprits)
    own, digest = guilty[0]
    others = {other: place for other, place in last.suspects.items() if other not in own}
    return Suspicion(others, (*culprits, (digest, now + _CULPRIT_SECONDS))[-_MAX_CULPRITS:])
