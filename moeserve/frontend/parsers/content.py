"""Text with calls in it, as far as no reasoning stands between."""

from __future__ import annotations

from moeserve.frontend.parsers.calls import CallShape
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Sink
from moeserve.frontend.parsers.values import Schemas


def read_content(
    feed: Feed,
    sink: Sink,
    calls: CallShape | None,
    schemas: Schemas,
    *,
    found: str | None = None,
    frame: tuple[str, ...] = (),
    is_framed: bool = False,
    late: str = "",
) -> Reading[None]:
    """Read text and calls until the end of the text.

    found: a marker of calls that was read. frame: markers that some models write before the text, which is the first,
    and behind it. is_framed: the prompt has the first. late: a marker that means nothing any more.
    """
    opens, others, bare = (calls.opens, calls.others, calls.bare) if calls is not None else ((), (), "")
    markers = tuple(filter(None, (*opens, *others, *frame, *bare, late)))
    if not markers:
        yield from _read_text(feed, sink)
        return
    ends = Markers(*markers)
    while True:
        if found is None:
            found = yield from feed.until(ends, sink.say)
        if found is None:
            return
        if calls is not None and found in opens:
            found = yield from calls.read(found, feed, sink, schemas)
            continue
        if calls is not None and found in bare:
            feed.unread(found)
            found = yield from calls.read("", feed, sink, schemas)
            continue
        if found in frame[:1] and sink.has_no_text:
            is_framed = True
            sink.border()
        elif found in frame[1:] and is_framed and (yield from feed.ahead(_text_is_over(feed, markers))):
            sink.border()
        elif found != late:
            sink.say_marker(found)
        found = None


def _text_is_over(feed: Feed, markers: tuple[str, ...]) -> Reading[bool]:
    """Return whether no more text comes, or none before a marker."""
    return not (yield from feed.space()) or (yield from feed.through(*markers)) != ""


def _read_text(feed: Feed, sink: Sink) -> Reading[None]:
    while not feed.ended:
        sink.say(feed.take(len(feed.rest)))
        yield
    sink.say(feed.take(len(feed.rest)))
