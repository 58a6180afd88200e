"""Every bound on what a client may ask, in one table, and how many connections the system lets a process have."""

from __future__ import annotations

import resource

MAX_N = 16
MAX_TRUNCATED_CONTEXTS = 4  # of a prompt that is truncated, as many times the context's tokens are read
MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGIT_BIAS_VALUE = 100.0
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_LENGTH_PENALTY = 10.0
MAX_TOKENS = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_CACHE_SALT_CHARS = 256
# Each costs another rendering of the prompt; of more the last ones count.
MAX_CACHE_BREAKPOINTS = 4
MAX_TOOLS = 1024
# What the APIs of OpenAI's chat, and of Responses and Messages, allow.
MAX_CHAT_TOOL_NAME_CHARS = 64
MAX_TOOL_NAME_CHARS = 128
MAX_TOOL_SCHEMA_BYTES = 256 * 1024
MAX_TOOL_DESCRIPTION_CHARS = 128 * 1024
MAX_CALLS_PER_MESSAGE = 256
MAX_CALLS = 8192
MAX_CALLED_NAME_CHARS = 256
MAX_TEMPLATE_VARIABLES = 64
MAX_TEMPLATE_VARIABLE_CHARS = 64 * 1024
MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CALLS_GRAMMAR_CHARS = 1024 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_FORMAT_CHOICES = 4096
GRAMMAR_CPU_SECONDS = 0.25
RENDER_CPU_SECONDS = 1.0
MAX_TEMPLATE_CHARS = 1_000_000
MAX_RENDERED_CHARS = 32_000_000

MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
RECEIVE_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 30.0
# Bytes that wait for a client to read them, from which on nothing more is written; one slice may come on top.
WRITE_BUFFER_BYTES = 128 * 1024
KEEP_ALIVE_S = 10.0
MAX_STATS_STREAMS = 32
# A body up to this size that needs neither template nor grammar is prepared on the event loop.
INLINE_BODY_BYTES = 4096
# A body from this size on may not take the last text process that is idle.
BIG_BODY_BYTES = 256 * 1024
# Bodies that wait for text processes, of one key and of all.
MAX_WAITING_BYTES_PER_KEY = 64 * 2**20
MAX_WAITING_BYTES = 256 * 2**20
# Of a prompt, for each token of the context: no text has so few tokens but one of long repetitions.
MAX_CHARS_PER_TOKEN = 32
# Of a body that is not wanted: it is read so that its client gets the answer.
MAX_DISCARDED_BYTES = 32 * 1024 * 1024
# Commas in a body: with tiny values between them 4 MB would take a second to read, and a hundred times the memory.
MAX_BODY_COMMAS = 524_288
MAX_UNKNOWN_FIELDS = 256
# Of a body: tools, and all but the prompt and tools: options, fields that do not exist, spaces.
MAX_TOOLS_BYTES = 1024 * 1024
MAX_OPTION_BYTES = 256 * 1024
# What `/tokenize` and `/detokenize` take at once.
MAX_TOKENIZE_CHARS = 1_000_000
MAX_CONVERTED_TOKENS = 262_144
# Of a token, where work is counted in characters.
CHARS_PER_TOKEN = 4

# Rendered text and its tokens that a text process remembers.
MAX_PIECE_BYTES = 64 * 2**20

# A conversation that is kept: requests and answers as JSON.
MAX_STORED_CONVERSATION_BYTES = 8 * 1024 * 1024
# Jobs (answers that outlive a connection) of one key that have not ended.
MAX_OPEN_JOBS_PER_KEY = 1024
# Processes that take a job over one after another without its putting anything out: then it has failed.
MAX_JOB_TRIES = 5
MAX_IDEMPOTENCY_KEY_CHARS = 255
# Files and batches of requests.
MAX_FILE_BYTES = 32 * 2**20
MAX_UPLOADS = 2  # that one HTTP process receives at once
MAX_FILES_PER_KEY = 1024
MAX_FILE_NAME_CHARS = 255
MAX_OPEN_BATCHES_PER_KEY = 64
MAX_BATCH_LINES = 50_000
MAX_BATCH_ERRORS = 50  # that a batch tells which has lines that are no requests
BATCHES_AT_ONCE = 4  # of one HTTP process, and one of each key
BATCH_AT_ONCE = 16  # requests of one batch
# How long a key is known after its answer was complete.
IDEMPOTENCY_KEY_S = 24 * 3600.0

MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_ECHOED_CHARS = 512

# Descriptors of an HTTP process beside connections: 44 were counted, and some come and go.
_OTHER_FILES = 56
_SPARE_FILES = 76


def allow_connections(most: int) -> int:
    """Raise this process's limit of open files for that many connections, and as many that are refused, as far as the
    system lets it. Return how many there can be."""
    wanted = 2 * most + _OTHER_FILES + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most_files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, hard))
    return connections_within(hard, most)


def connections_within(limit: int, most: int) -> int:
    """Return the number of connections, at most `most`, that a process with this limit of open files can have."""
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, (limit - _OTHER_FILES) // 2))
