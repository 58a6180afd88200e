"""Which running server a command asks."""

from __future__ import annotations

import click


def _base_url(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Addresses as people write them: a scheme may be missing, and `/v1` may be there."""
    return (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")


server_option = click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, callback=_base_url, help="Address of the server."
)
