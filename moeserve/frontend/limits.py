"""Every bound on requests, in one table, and the number of connections that the system lets a process have."""

from __future__ import annotations

import resource

MAX_N = 16
MAX_TRUNCATED_CONTEXTS = 4  # a prompt that is truncated may be this many times as long as the context
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
MAX_CACHE_BREAKPOINTS = 4  # each renders the prompt once more; of a longer list the last ones count
MAX_TOOLS = 1024
MAX_CHAT_TOOL_NAME_CHARS = 64  # the bound of OpenAI's chat API
MAX_TOOL_NAME_CHARS = 128  # the bound of the Responses and Messages APIs
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
# No more is written while this many bytes wait for a client to read them; one slice may come on top.
WRITE_BUFFER_BYTES = 128 * 1024
KEEP_ALIVE_S = 10.0
MAX_STATS_STREAMS = 32
# A body up to this size that needs neither template nor grammar is prepared on the event loop.
INLINE_BODY_BYTES = 4096
# A body from this size on may not take the last text process that is idle.
BIG_BODY_BYTES = 256 * 1024
# Bytes that an HTTP process holds for requests, of one key and of all keys: bodies that arrive or wait to be read, kept
# items that they refer to, what answers repeat of them, and kept answers that clients have not read yet.
MAX_HELD_BYTES_PER_KEY = 128 * 2**20
MAX_HELD_BYTES = 512 * 2**20
# Characters of a prompt for each token of the context: only long repetitions have fewer tokens than that.
MAX_CHARS_PER_TOKEN = 32
# Bytes of a refused body that are read and dropped, so that its client gets the answer.
MAX_DISCARDED_BYTES = 32 * 1024 * 1024
# Commas in a body: with tiny values between them 4 MB would take a second to read, and a hundred times the memory.
MAX_BODY_COMMAS = 524_288
MAX_UNKNOWN_FIELDS = 256
# Bytes of a body's tools, and of all in it but prompt and tools: options, unknown fields, spaces.
MAX_TOOLS_BYTES = 1024 * 1024
MAX_OPTION_BYTES = 256 * 1024
# The longest text of `/tokenize` and list of `/detokenize`.
MAX_TOKENIZE_CHARS = 1_000_000
MAX_CONVERTED_TOKENS = 262_144
CHARS_PER_TOKEN = 4  # where work on tokens is counted in characters

# Bytes of rendered text and its tokens that a text process remembers.
MAX_PIECE_BYTES = 64 * 2**20

# Bytes of a conversation that is kept: requests and answers as JSON.
MAX_STORED_CONVERSATION_BYTES = 8 * 1024 * 1024
# Open responses in the background of one API key.
MAX_OPEN_JOBS_PER_KEY = 1024
# A job fails once this many processes took it over, one after another, without any output.
MAX_JOB_TRIES = 5
MAX_IDEMPOTENCY_KEY_CHARS = 255
# Bytes of an answer that is kept for its `Idempotency-Key`. A longer one goes to its present clients and is not kept.
MAX_KEPT_ANSWER_BYTES = 8 * 2**20
# Files and batches of requests.
MAX_FILE_BYTES = 32 * 2**20
MAX_FILES_PER_KEY = 1024
MAX_FILE_NAME_CHARS = 255
MAX_OPEN_BATCHES_PER_KEY = 64
MAX_BATCH_LINES = 50_000
MAX_BATCH_ERRORS = 50  # invalid lines that a failed batch lists
BATCH_AT_ONCE = 16  # requests of one batch that run at once
# Seconds for which an idempotency key is known after its answer was complete.
IDEMPOTENCY_KEY_S = 24 * 3600.0

MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_ECHOED_CHARS = 512

# The descriptors that an HTTP process needs beside connections: 44 were counted, and some come and go.
_OTHER_FILES = 56
_SPARE_FILES = 76


def allow_connections(most: int) -> int:
    """Raise this process's limit of open files for `most` connections and as many refused ones, as far as the system
    allows. Return the number of connections that there can be."""
    wanted = 2 * most + _OTHER_FILES + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most_files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, hard))
    return connections_within(hard, most)


def connections_within(limit: int, most: int) -> int:
    """Return the number of connections, at most `most`, that a process with this limit of open files can have."""
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, (limit - _OTHER_FILES) // 2))
