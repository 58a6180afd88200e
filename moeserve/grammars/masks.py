"""The tokens that grammars allow requests next, made on threads beside the engine's.

A request with a grammar waits outside the queue until its grammar is compiled and its first mask is made; after each
token it waits for its next mask. The engine reports which requests need a mask and takes the masks that are made, so a
late mask delays only its own request. A mask is a function of the grammar and the output so far.

llguidance holds no interpreter lock while it compiles or makes a mask. Its own parallel executor is not used: it
returns when the slowest mask of a batch is made.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog
from llguidance import LLMatcher, LLTokenizer

from moeserve.grammars.compiler import GrammarError, compile_grammar, error_of
from moeserve.grammars.layout import Layout, allows
from moeserve.grammars.made_masks import MadeMask, no_drafts
from moeserve.grammars.queue import Kept, KeptGrammars
from moeserve.grammars.threads import FairThreads, Job, QuickThreads
from moeserve.grammars.tokens import load_tokens
from moeserve.plan import GRAMMAR_FAILED, Request

log = structlog.get_logger(__name__)

# The bound for compiled grammars that are kept, in use or not. Grammars in use may take more.
_KEPT_BYTES = 256 * 2**20
# Upper estimates of the memory of llguidance 1.9, measured by the allocator on schemas of up to 128 KiB: a compiled
# grammar takes bytes of its own and bytes per byte of its text; masks add bytes per second of processor time, until the
# lexer is full.
_GRAMMAR_BYTES = 512 * 2**10
_BYTES_PER_TEXT_BYTE = 96
_BYTES_PER_MASK_SECOND = 200e6
_MAX_GROWN_BYTES = 16 * 2**20
# A mask of states that the lexer has takes less processor time, and adds nothing.
_STEADY_SECONDS = 50e-6
# After a mask that took more processor time, the request's masks are made by the threads that compile.
_QUICK_SECONDS = 0.002
# More new tokens than these, as after a restart, are consumed by the threads that compile.
_QUICK_TOKENS = 64
# The tokens of a character but its last one.
_MOST_UNFINISHED = 3


class _LexerFullError(GrammarError):
    """The lexer that the copies of a grammar share has reached its limit."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A matcher's next mask and what may follow it, as in `MadeMask`. masks: the next one, then one for each draft."""

    masks: list[bytes]
    draft_tokens: array[int]
    num_forced: int = 0
    num_laid: int = 0


@dataclass(eq=False, slots=True)
class _Held:
    """An open request. Its matcher has consumed `num_consumed` tokens of its output; only its job touches the matcher
    and the layout of the output.

    Either `compilation` or `kept` is set: the compilation it waits for, or the grammar that its matcher copies.
    is_alone: other requests get no copies of it. drafts: of the request, when it came to need its next mask.
    """

    request: Request
    grammar: str
    drafts: array[int]
    matcher: LLMatcher | None = None
    compilation: _Compilation | None = None
    kept: Kept[LLMatcher] | None = None
    num_consumed: int = 0
    is_slow: bool = False
    is_alone: bool = False
    layout: Layout = field(default_factory=Layout)


@dataclass(eq=False, slots=True)
class _Compilation:
    """A grammar that is compiled for the requests in `waiting`, at the expense of `job.tenant`."""

    grammar: str
    num_bytes: int
    job: Job
    waiting: list[_Held]


class GrammarMasks:
    """Owns the matchers of open requests, the compiled grammars and the threads.

    One thread calls the methods, and never waits for a compilation.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_bytes: int = _KEPT_BYTES,
        num_cores: int | None = None,
        most_drafts: int = 0,
    ) -> None:
        """vocab_size: of the logits, which may be wider than the tokenizer, or narrower. A thread reads the file;
        without it, requests that have a grammar fail. max_bytes: of compiled grammars that are kept. num_cores: those
        of this process unless given; up to half of them make masks, and up to a quarter compile. most_drafts: tokens
        that a grammar forces are offered as drafts until a request has this number of them."""
        self._num_mask_bytes = 4 * -(-vocab_size // 32)
        self._most_drafts = most_drafts
        self._tokens: Future[LLTokenizer] = Future()
        arguments = (self._tokens, tokenizer_json, eos_token_ids)
        threading.Thread(target=_load, args=arguments, name="tokens", daemon=True).start()
        self._kept = KeptGrammars[LLMatcher](max_bytes)
        self._compiling: dict[str, _Compilation] = {}
        self._held: dict[Request, _Held] = {}
        self._awaited: set[Request] = set()
        self._made: list[MadeMask] = []
        self._done: SimpleQueue[Job] = SimpleQueue()
        cores = num_cores or len(os.sched_getaffinity(0))
        self._quick = QuickThreads(max(2, min(8, cores // 2)), self._done)
        self._slow = FairThreads(max(1, min(4, cores // 4)), max_bytes, self._done)
        self._num_quick = 0

    @property
    def is_awaited(self) -> bool:
        """True if a request's next mask is not made, or not taken."""
        return bool(self._awaited or self._made)

    def update(self, changes: Iterable[Request], drafts_of: Callable[[Request], array[int]] = no_drafts) -> None:
        """Begin the masks of requests that need one, and free all that finished requests hold.

        drafts_of: returns a request's drafts, behind each of which its grammar makes a mask as well.
        """
        for request in changes:
            held = self._held.get(request)
            if request.finished:
                if held is not None:
                    self._forget(held)
                continue
            self._awaited.add(request)
            if held is None:
                self._begin(request, drafts_of(request))
            else:
                held.drafts = drafts_of(request)
                self._advance(held)

    def take(self, seconds: float = 0.0) -> list[MadeMask]:
        """Return the masks that were made. Wait for quick ones up to `seconds`."""
        deadline = time.monotonic() + seconds
        with suppress(Empty):
            while True:
                left = deadline - time.monotonic() if self._num_quick else 0.0
                job = self._done.get(timeout=left) if left > 0.0 else self._done.get_nowait()
                job.done(job)
        for job in self._slow.take_overdue():
            job.done(job)
        made, self._made = self._made, []
        return made

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until a thread has done something."""
        with suppress(Empty):
            job = self._done.get(timeout=seconds)
            job.done(job)

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is held or compiled, as it must be without open requests."""
        num_held, num_compiling = len(self._held), len(self._compiling) + len(self._slow)
        if num_held or num_compiling or self._slow.num_held_bytes:
            raise AssertionError(f"idle, but {num_held} requests are held and {num_compiling} grammars being compiled")

    def close(self) -> None:
        """End the threads after their present jobs."""
        self._quick.close()
        self._slow.close()

    def _begin(self, request: Request, drafts: array[int]) -> None:
        """Find or compile the grammar of a request."""
        assert request.sampling.grammar is not None
        held = self._held[request] = _Held(request, request.sampling.grammar, drafts)
        kept = self._kept.use(held.grammar)
        if kept is not None:
            if kept.num_users == 1:
                self._slow.hold(kept.tenant, kept.num_held)
            self._copy(held, kept)
        elif held.grammar in self._compiling:
            held.compilation = self._compiling[held.grammar]
            held.compilation.waiting.append(held)
        else:
            self._compiling[held.grammar] = self._compile(held)

    def _compile(self, held: _Held) -> _Compilation:
        text = held.grammar

        def compiled(job: Job) -> None:
            self._compiled(compilation, job)

        job = Job(held.request.terms.tenant, lambda: compile_grammar(self._tokens.result(), text), compiled)
        num_bytes = _GRAMMAR_BYTES + _BYTES_PER_TEXT_BYTE * len(text)
        compilation = held.compilation = _Compilation(text, num_bytes, job, [held])
        self._slow.put(job, num_bytes)
        return compilation

    def _compiled(self, compilation: _Compilation, job: Job) -> None:
        """Hand a compiled grammar, or the failure, to the requests that wait for it."""
        is_shared = self._compiling.get(compilation.grammar) is compilation
        if is_shared:
            del self._compiling[compilation.grammar]
        waiting, matcher = compilation.waiting, job.result
        if not waiting or not isinstance(matcher, LLMatcher):
            self._slow.release(job.tenant, compilation.num_bytes)
        if not isinstance(matcher, LLMatcher):
            for held in waiting[:]:
                self._fail(held, job.error)
            return
        kept = Kept(compilation.grammar, matcher, job.tenant, compilation.num_bytes, num_users=len(waiting))
        if is_shared:
            self._kept.put(kept)
        for held in waiting:
            held.compilation = None
            self._copy(held, kept)

    def _copy(self, held: _Held, kept: Kept[LLMatcher]) -> None:
        held.kept, held.matcher = kept, kept.value.deep_copy()
        self._advance(held)

    def _advance(self, held: _Held) -> None:
        """Have a thread consume the output that the matcher lacks, and make the mask."""
        request, matcher, limits = held.request, held.matcher, (self._num_mask_bytes, self._most_drafts)
        assert matcher is not None
        output = request.token_ids[request.num_prompt_tokens + held.num_consumed :].tolist()
        held.num_consumed += len(output)
        sampling, drafts = request.sampling, held.drafts
        # The number of masks from the first on without the tokens that would end the request.
        num_banned = max(0, sampling.min_tokens - request.num_output_tokens)
        banned = (sampling.stop_token_ids, num_banned)
        is_quick = not held.is_slow and len(output) <= _QUICK_TOKENS

        def advanced(job: Job) -> None:
            self._num_quick -= is_quick
            self._advanced(held, job)

        def advance() -> _Ahead:
            _consume(matcher, output, may_be_cut=request.asked.thought is not None)
            if self._most_drafts:
                held.layout.read(output, self._tokens.result())
            return _look_ahead(matcher, drafts, held.layout, banned, *limits)

        job = Job(request.terms.tenant, advance, advanced)
        self._num_quick += is_quick
        if is_quick:
            self._quick.put(job)
        else:
            self._slow.put(job)

    def _advanced(self, held: _Held, job: Job) -> None:
        """Receive the mask of a request, or the failure of its grammar."""
        kept = held.kept
        if held.request not in self._held or kept is None:
            return
        made = job.result
        num_masks = len(made.masks) if isinstance(made, _Ahead) else 1
        held.is_slow |= job.cpu_seconds > _QUICK_SECONDS * num_masks
        grown = _BYTES_PER_MASK_SECOND * max(0.0, job.cpu_seconds - _STEADY_SECONDS * num_masks)
        self._kept.grow(kept, int(grown), _MAX_GROWN_BYTES)
        if isinstance(made, _Ahead):
            self._awaited.remove(held.request)
            mask, *after = made.masks
            counts = made.num_forced, made.num_laid
            self._made.append(MadeMask(held.request, mask, None, made.draft_tokens, tuple(after), *counts))
        elif isinstance(job.error, _LexerFullError) and not held.is_alone:
            # Requests that share a lexer fill it together, but no request may fail because of another one.
            self._kept.discard(held.grammar)
            self._release(held)
            held.num_consumed, held.is_alone = 0, True
            self._compile(held)
        else:
            self._fail(held, job.error)

    def _fail(self, held: _Held, error: Exception | None) -> None:
        if isinstance(error, GrammarError):
            reason = f"{GRAMMAR_FAILED}{error}"
        else:
            # A fault of the library, or of this code, must not fail another request.
            log.error("grammar_fault", request_id=held.request.request_id, exc_info=error)
            reason = f"its grammar's mask could not be made: {type(error).__name__}"
        self._forget(held)
        self._made.append(MadeMask(held.request, error=reason))

    def _forget(self, held: _Held) -> None:
        """Free everything that a request holds. Its compilation continues and may serve another request."""
        del self._held[held.request]
        self._awaited.discard(held.request)
        compilation = held.compilation
        if compilation is None:
            self._release(held)
            return
        compilation.waiting.remove(held)
        if not compilation.waiting and self._slow.remove(compilation.job) and not held.is_alone:
            del self._compiling[compilation.grammar]

    def _release(self, held: _Held) -> None:
        kept = held.kept
        assert kept is not None
        held.kept = held.matcher = None
        self._kept.release(kept)
        if not kept.num_users:
            self._slow.release(kept.tenant, kept.num_held)


def _load(tokens: Future[LLTokenizer], tokenizer_json: Path, eos_token_ids: Sequence[int]) -> None:
    try:
        tokens.set_result(load_tokens(tokenizer_json, eos_token_ids))
    except Exception as error:
        tokens.set_exception(error)


def _consume(matcher: LLMatcher, output: list[int], *, may_be_cut: bool) -> None:
    """Let a matcher consume the newest tokens.

    may_be_cut: the output may have the forced end of a thought inside a character. Grammars know whole characters
    only, so the matcher forgets the tokens of an unfinished one.
    """
    while may_be_cut and (num_allowed := matcher.validate_tokens(output)) < len(output):
        matcher.consume_tokens(output[:num_allowed])
        output = output[num_allowed:]
        for _ in range(_MOST_UNFINISHED):
            if not matcher.rollback(1) or matcher.validate_tokens(output):
                break
        if matcher.is_error() or not matcher.validate_tokens(output):
            break
    if output:
        matcher.consume_tokens(output)


def _look_ahead(
    matcher: LLMatcher,
    drafts: Sequence[int],
    layout: Layout,
    banned: tuple[Sequence[int], int],
    num_bytes: int,
    most: int,
) -> _Ahead:
    """Return a matcher's next mask, then the masks after each draft that the grammar allows, after each token that it
    forces next, and after each token of the layout and each forced one behind it.

    banned: tokens that the first masks are to forbid, and the number of these masks. num_bytes: the most of a mask.
    most: the number of drafts up to which others than `drafts` are added. Raise GrammarError if the first mask cannot
    be made.
    """
    tokens, num_masks = banned
    masks = [_mask_of(matcher, tokens if num_masks else (), num_bytes)]
    if not (most or (drafts and allows(masks[0], drafts[0]))):
        return _Ahead(masks, array("i"))
    # An error of a matcher stays, and a wrong draft must not leave one.
    ahead = matcher.deep_copy()

    def follow(guesses: Sequence[int]) -> array[int]:
        return _follow(ahead, guesses, banned, num_bytes, masks)

    def forced() -> array[int]:
        left = most + 1 - len(masks)
        return follow(ahead.compute_ff_tokens()[:left]) if left > 0 and not ahead.is_error() else array("i")

    guessed, certain, laid = follow(drafts), forced(), array("i")
    run, is_end = guessed + certain, len(certain) > 0
    while len(masks) <= most and not ahead.is_error():
        guess = layout.guess(masks[-1], run[-1] if run else None, is_end=is_end)
        if guess is None or not (run := follow([guess])):
            break
        run += (behind := forced())
        laid += run
        is_end = len(behind) > 0
    return _Ahead(masks, guessed + certain + laid, len(certain), len(laid))


def _follow(
    ahead: LLMatcher, guesses: Sequence[int], banned: tuple[Sequence[int], int], num_bytes: int, masks: list[bytes]
) -> array[int]:
    """Let a matcher consume guesses as long as the last of `masks` allows them, and add the mask after each.

    Return the guesses that it has consumed. A token that ends the request is none of them.
    """
    tokens, num_masks = banned
    followed: array[int] = array("i")
    for guess in guesses:
        if guess in tokens or not allows(masks[-1], guess) or not ahead.try_consume_tokens([guess]):
            break
        try:
            masks.append(_mask_of(ahead, tokens if len(masks) < num_masks else (), num_bytes))
        except GrammarError:
            break
        followed.append(guess)
    return followed


def _mask_of(matcher: LLMatcher, banned: Sequence[int], num_bytes: int) -> bytes:
    """Return a matcher's mask, of at most `num_bytes`. Raise GrammarError."""
    mask: bytes = b"" if matcher.is_error() else matcher.compute_bitmask()[:num_bytes]
    if matcher.is_error():
        kind = _LexerFullError if matcher.get_error().startswith("lexer error") else GrammarError
        raise kind(error_of(matcher))
    if _is_empty(mask):
        raise GrammarError("no token of the model continues the output")
    return _without(mask, banned) if banned else mask


def _without(mask: bytes, banned: Sequence[int]) -> bytes:
    """Return the mask without banned tokens; unchanged if it allows only banned tokens."""
    kept = bytearray(mask)
    for token in banned:
        if token // 8 < len(kept):
            kept[token // 8] &= ~(1 << token % 8)
    return mask if _is_empty(kept) else bytes(kept)


def _is_empty(mask: bytes | bytearray) -> bool:
    return mask.count(0) == len(mask)
