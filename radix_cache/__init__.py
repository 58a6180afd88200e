"""Which KV block holds which tokens. `PrefixCache` is the interface; a `Fill` copies blocks into it."""

from radix_cache.block_copies import BlockCopy, Kind, border_name
from radix_cache.errors import BudgetError, InvariantError, LeaseError
from radix_cache.facts import Evicted, Fact, Published
from radix_cache.fills import Fill, begin_fill
from radix_cache.listing import CachedPrefix, Listing, list_prefixes
from radix_cache.misses import Miss, MissReason
from radix_cache.nodes import PUBLIC, Lease, Snapshot
from radix_cache.prefix_cache import PrefixCache
from radix_cache.retention import account_of
from radix_cache.retentions import Shares
from radix_cache.room import Room, is_still_full
from radix_cache.stored import NAME_BYTES, Chores, StoredBlock, StoredBlocks, Tier, used_at
from radix_cache.window_blocks import least_window_blocks
