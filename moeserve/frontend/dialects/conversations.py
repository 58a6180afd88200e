"""The bodies of the routes under `/v1/conversations`."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import fields
from moeserve.frontend.dialects.responses_items import Item, ItemReader, is_reference
from moeserve.frontend.http import invalid


class ConversationBody(msgspec.Struct):
    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ItemsBody(msgspec.Struct):
    items: list[dict[str, Any]] | None = None


class MetadataBody(msgspec.Struct):
    metadata: dict[str, str] | None = None


class Checked(msgspec.Struct):
    """The items and the metadata of a body that was checked; metadata is JSON of an object."""

    items: list[Item]
    metadata: msgspec.Raw


def parse_conversation(body: bytes) -> Checked:
    """Return the content of a conversation that is to be made. Raises ApiError."""
    read, _ = fields.decode_json(body or b"{}", ConversationBody)
    return _checked(read.items, read.metadata)


def parse_items(body: bytes) -> Checked:
    """Return items that are to be added. Raises ApiError."""
    read, _ = fields.decode_json(body, ItemsBody)
    if not read.items:
        raise invalid("`items` must hold at least one item", "items")
    return _checked(read.items, None)


def parse_metadata(body: bytes) -> Checked:
    """Return metadata that is to take the place of other metadata. Raises ApiError."""
    read, _ = fields.decode_json(body, MetadataBody)
    if read.metadata is None:
        raise invalid("`metadata` is required", "metadata")
    return _checked(None, read.metadata)


def _checked(items: list[Item] | None, metadata: dict[str, str] | None) -> Checked:
    items = items or []
    fields.check_metadata(metadata)
    if len(items) > limits.MAX_MESSAGES:
        raise invalid(f"`items` takes at most {limits.MAX_MESSAGES} entries", "items", "too_many_values")
    fields.check_depth(items)
    # The calls that these are outputs of may be in the conversation.
    calls = {item["call_id"] for item in items if isinstance(item.get("call_id"), str)}
    reader = ItemReader(lambda _: None, calls)
    for index, item in enumerate(items):
        if is_reference(item):
            raise invalid(f"`items[{index}]` must be an item, not a reference to one", f"items[{index}]")
        if not isinstance(item.get("id"), str | None):
            raise invalid(f"`items[{index}].id` must be a string", f"items[{index}].id")
        reader.add(item, f"items[{index}]")
    return Checked(items, msgspec.Raw(msgspec.json.encode(metadata or {})))
