"""The architectures of GGUF files that are read. Torch-free."""

from __future__ import annotations

from moeserve.model.gguf.config import BUILDERS, Config, Fields, base_of, head_dim, token_ids_of
from moeserve.model.gguf.further import FURTHER, further_builder
from moeserve.model.gguf.header import GgufHeader
from moeserve.model.gguf.unread import check_unread
from moeserve.model.spec import UnsupportedModel


def config_of(header: GgufHeader) -> Config:
    """Return `config.json`. Raise CheckpointError, UnsupportedModel for an architecture without a builder."""
    fields = Fields(header)
    build = further_builder(fields) or BUILDERS.get(fields.architecture)
    if build is None:
        raise UnsupportedModel(
            f"GGUF models of architecture {fields.architecture[:40]!r} are not supported; these are: "
            f"{', '.join((*BUILDERS, *FURTHER))}."
        )
    config = {**base_of(fields), **build(fields), **token_ids_of(header)}
    check_unread(fields.architecture, fields.unread(), head_dim(fields), fields.count("context_length"))
    return config
