"""Lists as OpenAI's API answers with them, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response

from moeserve.frontend.errors import invalid
from moeserve.frontend.http import json_bytes

_DEFAULT_PAGE, _MAX_PAGE = 20, 100


def page_of(listed: Sequence[tuple[str, bytes]], query: QueryParams, *, most: int = _MAX_PAGE) -> Response:
    """Return a page of a list of ids and JSON, which is in ascending order; the latest comes first unless `order` is
    `asc`. Raises ApiError for a query that is none."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_DEFAULT_PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("`order` must be asc or desc", "order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise invalid(f"`limit` must be 1 to {most}", "limit")
    items = list(listed) if order == "asc" else list(reversed(listed))
    if after is not None:
        ids = [name for name, _ in items]
        if after not in ids:
            raise invalid(f"`after` is {after[:80]!r}, which is not in this list", "after")
        items = items[ids.index(after) + 1 :]
    return list_of(items[: int(limit)], has_more=len(items) > int(limit))


def list_of(page: Sequence[tuple[str, bytes]], *, has_more: bool = False) -> Response:
    content = {
        "object": "list",
        "data": [msgspec.Raw(item) for _, item in page],
        "first_id": page[0][0] if page else None,
        "last_id": page[-1][0] if page else None,
        "has_more": has_more,
    }
    return json_bytes(msgspec.json.encode(content))
