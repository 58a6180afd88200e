"""Which KV block holds which tokens. `PrefixCache` is the only face."""

from radix_cache.errors import InvariantError, LeaseError
from radix_cache.prefix_cache import PrefixCache
from radix_cache.tree import Lease

__all__ = ["InvariantError", "Lease", "LeaseError", "PrefixCache"]
