"""KV of turns that have called tools is retained until the tools have run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moeserve.plan import FinishReason, Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part
from radix_cache import PrefixCache

# Seconds for which a turn that called tools is retained. In a public trace 95 % of an agent's turns follow within 10 s;
# beside prompts that nothing continues 60 s kept more of the others than 10 s (docs/prompt-cache.md). A turn
# that is continued later goes by its last use like any other prefix.
RETAINED_S = 60.0
# The number of latest ended requests whose calls a frontend may still report: it does so within milliseconds.
_MOST_ENDED = 64


class ToolWaits(Part):
    """Retains the KV of ended requests once a frontend tells that their answers call tools."""

    def __init__(self, caches: Sequence[PrefixCache], retained_s: float = RETAINED_S) -> None:
        """caches: by rank."""
        self._caches = caches
        self._retained_s = retained_s
        self._ended: OrderedDict[str, Request] = OrderedDict()

    def left(self, output: RequestOutput) -> None:
        """Remember a request whose answer is complete and may call tools."""
        request = output.request
        if output.finish_reason is FinishReason.STOP and request.asked.has_tools:
            self._ended[request.request_id] = request
            if len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)

    def turned(self, request_id: str) -> None:
        """Retain the KV of a request that has ended with calls, as far as its account's budget has room for it.

        What clients retain does not give way for it, turns that ended earlier do.
        """
        request = self._ended.pop(request_id, None)
        if request is not None:
            cache = self._caches[request.rank]
            lease = cache.match(request.token_ids, request.namespace)
            cache.retentions.retain(
                lease, lease.num_published_tokens, self._retained_s, request.terms.retained, yields=True
            )
            cache.release(lease)
