"""The store's file: SQLite in WAL mode, readable by its owner alone, with one version of the schema."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

# Raised with every change of the schema. A file of an earlier one lacks the tables that came later and gets them;
# others are refused.
VERSION = 3
_EARLIER = (1, 2)
_BUSY_S = 10.0  # how long a transaction waits for that of another process
_MAX_WAL_BYTES = 64 * 2**20  # bytes of the write-ahead log that a checkpoint leaves at most
_SCHEMA = """
-- The bytes that each caller keeps, by the digest of its key.
CREATE TABLE IF NOT EXISTS shelves(caller BLOB PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
-- The items that callers can name. `needs`: the item that this one needs: it is hidden, not dropped, until this one is.
-- A `busy` row does not make room.
CREATE TABLE IF NOT EXISTS kept(
  id TEXT PRIMARY KEY,
  caller BLOB NOT NULL,
  size INTEGER NOT NULL,
  used REAL NOT NULL,
  needs TEXT,
  hidden INTEGER NOT NULL DEFAULT 0,
  busy INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS kept_by_use ON kept(caller, used) WHERE NOT hidden AND NOT busy;
CREATE INDEX IF NOT EXISTS kept_by_age ON kept(used) WHERE NOT hidden AND NOT busy;
CREATE INDEX IF NOT EXISTS kept_by_need ON kept(needs) WHERE needs IS NOT NULL;
CREATE TRIGGER IF NOT EXISTS kept_more AFTER INSERT ON kept BEGIN
  INSERT INTO shelves VALUES (new.caller, new.size)
  ON CONFLICT DO UPDATE SET num_bytes = num_bytes + new.size;
END;
CREATE TRIGGER IF NOT EXISTS kept_changed AFTER UPDATE OF size ON kept BEGIN
  UPDATE shelves SET num_bytes = num_bytes + new.size - old.size WHERE caller = new.caller;
END;
CREATE TRIGGER IF NOT EXISTS kept_less AFTER DELETE ON kept BEGIN
  UPDATE shelves SET num_bytes = num_bytes - old.size WHERE caller = old.caller;
  DELETE FROM shelves WHERE caller = old.caller AND num_bytes = 0;
END;
-- `input`: the items of the request alone. `past_size`: bytes of all turns before.
CREATE TABLE IF NOT EXISTS responses(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  response BLOB NOT NULL,
  input BLOB NOT NULL,
  past_size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS conversations(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  created INTEGER NOT NULL,
  metadata BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS items(
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  conversation TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
  id TEXT NOT NULL,
  item BLOB NOT NULL,
  UNIQUE (conversation, id));
CREATE INDEX IF NOT EXISTS items_by_id ON items(id);
-- Generations that outlive their connection (`jobs.py`). `owner`: the HTTP process that runs it. `tries`: processes
-- that have taken it over since it last put anything out. `ended_at`: UNIX time. `failure`: of a failed one.
-- `is_kept`: the response of a job that is done was kept.
CREATE TABLE IF NOT EXISTS jobs(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  caller BLOB NOT NULL,
  record BLOB NOT NULL,
  owner TEXT NOT NULL,
  tries INTEGER NOT NULL DEFAULT 0,
  state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'done', 'failed', 'cancelled')),
  ended_at REAL,
  failure BLOB,
  is_kept INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS open_jobs ON jobs(owner) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS open_jobs_by_caller ON jobs(caller) WHERE state = 'open';
CREATE TABLE IF NOT EXISTS job_outputs(
  job TEXT NOT NULL REFERENCES jobs ON DELETE CASCADE,
  number INTEGER NOT NULL,
  entries BLOB NOT NULL,
  PRIMARY KEY (job, number)) WITHOUT ROWID;
-- `name`: digest of the key that the client chose. `content`: digest of the request.
CREATE TABLE IF NOT EXISTS idempotency(
  caller BLOB NOT NULL,
  name BLOB NOT NULL,
  content BLOB NOT NULL,
  job TEXT NOT NULL REFERENCES jobs ON DELETE CASCADE,
  PRIMARY KEY (caller, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS idempotency_by_job ON idempotency(job);
CREATE TABLE IF NOT EXISTS files(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  name TEXT NOT NULL,
  purpose TEXT NOT NULL,
  created INTEGER NOT NULL,
  content BLOB NOT NULL);
-- `owner`: the HTTP process that works on it. `times`: JSON, UNIX times by state.
CREATE TABLE IF NOT EXISTS batches(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  caller BLOB NOT NULL,
  owner TEXT NOT NULL,
  state TEXT NOT NULL,
  path TEXT NOT NULL,
  input_file TEXT NOT NULL,
  created INTEGER NOT NULL,
  expires INTEGER NOT NULL,
  metadata BLOB NOT NULL,
  times TEXT NOT NULL DEFAULT '{}',
  errors BLOB,
  total INTEGER NOT NULL DEFAULT 0,
  output_file TEXT,
  error_file TEXT);
CREATE INDEX IF NOT EXISTS batches_by_caller ON batches(caller);
CREATE TABLE IF NOT EXISTS batch_results(
  batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE,
  number INTEGER NOT NULL,
  line BLOB NOT NULL,
  failed INTEGER NOT NULL,
  PRIMARY KEY (batch, number)) WITHOUT ROWID;
"""


class StoreError(Exception):
    """The store's file cannot be used; the message is one sentence for the operator."""


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection in autocommit mode, for one thread at a time. The file must be there (`prepare`)."""
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute(f"PRAGMA journal_size_limit = {_MAX_WAL_BYTES}")
    return connection


def prepare(path: Path) -> None:
    """Make the file and its folder if they are not there. Raises StoreError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives the files beside it the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise StoreError(f"The response store {path} cannot be written ({error.strerror}).") from None
    try:
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        try:
            _make_tables(connection, path)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"The response store {path} cannot be used ({error}).") from None


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    # It takes effect in a file without tables alone.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    # The first statement sees what another process has made as a whole.
    version, num_tables = connection.execute(
        "SELECT (SELECT user_version FROM pragma_user_version), (SELECT count(*) FROM sqlite_schema)"
    ).fetchone()
    if num_tables == 0 or version in _EARLIER:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    elif version != VERSION:
        raise StoreError(f"The response store {path} was not written by this version of moeserve: name another file.")
