"""Which KV block holds which tokens. `PrefixCache` is the only face."""

from radix_cache.errors import InvariantError, LeaseError
from radix_cache.lease import Lease
from radix_cache.prefix_cache import PrefixCache

__all__ = ["InvariantError", "Lease", "LeaseError", "PrefixCache"]
