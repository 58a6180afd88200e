"""Lists in pages, as OpenAI's API has them: the page that a request asks for, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Scope

from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.http import held_json

_DEFAULT_PAGE, _MAX_PAGE = 20, 100
_LAST = 2**63 - 1  # above the number of every row


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. limit: rows at most. after: the id of the row before its first one."""

    limit: int
    after: str | None = None
    ascending: bool = False

    def clause(self, column: str, after: int | None) -> tuple[str, tuple[int, int]]:
        """Return the end of a query, behind a condition, that finds the page's rows and one more; and its parameters.

        column: of the rows' numbers. after: the number of the row before the first one.
        """
        first = after if after is not None else (-1 if self.ascending else _LAST)
        sign, order = (">", "ASC") if self.ascending else ("<", "DESC")
        return f"AND {column} {sign} ? ORDER BY {column} {order} LIMIT ?", (first, self.limit + 1)

    def places(self, total: int, after: int | None) -> tuple[range, bool]:
        """Return the places of the page's rows in a list of `total` rows, and whether there are rows behind them.

        after: the place of the row before the first one.
        """
        order = range(total) if self.ascending else range(total - 1, -1, -1)
        start = 0 if after is None else order.index(after) + 1
        return order[start : start + self.limit], start + self.limit < total

    def not_listed(self) -> ApiError:
        """400: the list has nothing of the id that the page is to follow."""
        return invalid(f"`after` is {(self.after or '')[:80]!r}, which is not in this list", "after")


@dataclass(frozen=True, slots=True)
class Listed:
    """The rows of a page, ids and JSON. has_more: there are rows behind it."""

    rows: Sequence[tuple[str, bytes]]
    has_more: bool = False


def read_page(query: QueryParams, *, most: int = _MAX_PAGE) -> Page:
    """Return the page that a request asks for. The latest rows come first unless `order` is `asc`. Raise ApiError."""
    order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_PAGE))
    if order not in ("asc", "desc"):
        raise invalid("`order` must be asc or desc", "order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise invalid(f"`limit` must be 1 to {most}", "limit")
    return Page(int(limit), query.get("after"), ascending=order == "asc")


def list_of(scope: Scope, listed: Listed) -> Response:
    """Return the answer to a request for a page. Raise ApiError (503)."""
    rows = listed.rows
    content = {
        "object": "list",
        "data": [msgspec.Raw(item) for _, item in rows],
        "first_id": rows[0][0] if rows else None,
        "last_id": rows[-1][0] if rows else None,
        "has_more": listed.has_more,
    }
    return held_json(scope, msgspec.json.encode(content))
