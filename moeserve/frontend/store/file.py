"""The store's file: SQLite in WAL mode, readable by its owner alone, and locks beside it that tell which processes use
it.

Services and HTTP processes hold locks in a second file for as long as they live. The kernel releases a lock when its
process ends, however it ends, and never before: no clock decides who is dead, and a process that stands still has not
ended. So the files must be on a disk of this machine.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

# Raised with every change of the schema. A file of an earlier version is changed by `_CHANGES` and gets the tables that
# it lacks; files of later versions are refused.
VERSION = 10
_BUSY_S = 10.0  # seconds that a transaction waits for a transaction of another process
_MAX_WAL_BYTES = 64 * 2**20  # bytes of the write-ahead log that a checkpoint leaves at most
_SCHEMA = """
-- One row (`clock.py`). `boot`: of the machine. `beginning`: the store's time at that boot. `behind`: seconds by which
-- the machine's clock is ahead of the store's.
CREATE TABLE IF NOT EXISTS clock(boot TEXT NOT NULL, beginning REAL NOT NULL, behind REAL NOT NULL);
-- The bytes that each caller keeps, by the digest of its key.
CREATE TABLE IF NOT EXISTS shelves(caller BLOB PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
-- The items that callers can name. `needs`: the item that this one needs: it is hidden, not dropped, until this one is.
-- A `busy` row does not make room.
CREATE TABLE IF NOT EXISTS kept(
  id TEXT PRIMARY KEY,
  caller BLOB NOT NULL,
  size INTEGER NOT NULL,
  used REAL NOT NULL,  -- by the store's clock
  needs TEXT,
  hidden INTEGER NOT NULL DEFAULT 0,
  busy INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS kept_by_use ON kept(caller, used) WHERE NOT hidden AND NOT busy;
CREATE INDEX IF NOT EXISTS kept_by_age ON kept(used) WHERE NOT hidden AND NOT busy;
CREATE INDEX IF NOT EXISTS kept_busy ON kept(caller) WHERE busy;
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
-- `head`: the response without its output. `input`: the items of the request alone. `past_size`: bytes of all turns
-- before.
CREATE TABLE IF NOT EXISTS responses(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  head BLOB NOT NULL,
  output BLOB NOT NULL,
  input BLOB NOT NULL,
  past_size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS conversations(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  created INTEGER NOT NULL,
  metadata BLOB NOT NULL);
-- `caller`: of the conversation. Its index is for finding an item in any conversation of a caller.
CREATE TABLE IF NOT EXISTS items(
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  conversation TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
  id TEXT NOT NULL,
  item BLOB NOT NULL,
  caller BLOB NOT NULL,
  UNIQUE (conversation, id));
CREATE INDEX IF NOT EXISTS items_of_caller ON items(caller, id);
CREATE INDEX IF NOT EXISTS items_in_order ON items(conversation, number);
-- Generations that outlive their connection (`jobs.py`). `owner`: the HTTP process that runs it. `tries`: processes
-- that have taken it over since it last put anything out. `input`: the items of the request, until its response has
-- them. `ended_at`: UNIX time. `failure`: of a failed one. `is_kept`: the response of a job that is done was kept.
-- Without it, a row of `responses` is shown alone.
CREATE TABLE IF NOT EXISTS jobs(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  caller BLOB NOT NULL,
  record BLOB NOT NULL,
  input BLOB NOT NULL DEFAULT x'5b5d',
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
-- `name`: digest of the key that the client chose. `content`: digest of the request. `id`: of its job, or else of its
-- answer. `owner`: the HTTP process that computes the answer. `headers`, `body`: of a whole answer.
CREATE TABLE IF NOT EXISTS idempotency(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  caller BLOB NOT NULL,
  name BLOB NOT NULL,
  content BLOB NOT NULL,
  owner TEXT,
  headers BLOB,
  body BLOB,
  UNIQUE (caller, name));
CREATE TABLE IF NOT EXISTS files(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  caller BLOB NOT NULL,
  name TEXT NOT NULL,
  purpose TEXT NOT NULL,
  created INTEGER NOT NULL,
  num_bytes INTEGER NOT NULL DEFAULT 0,
  is_whole INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS files_by_caller ON files(caller);
-- The content of a file is its pieces in the order of their places.
CREATE TABLE IF NOT EXISTS file_pieces(
  file TEXT NOT NULL,
  place INTEGER NOT NULL,
  piece BLOB NOT NULL,
  PRIMARY KEY (file, place));
-- The files whose pieces are still to be deleted, some in each transaction: to overwrite a large file takes seconds.
CREATE TABLE IF NOT EXISTS dropped_files(id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS file_dropped AFTER DELETE ON files BEGIN
  INSERT INTO dropped_files VALUES (old.id);
END;
-- `owner`: the HTTP process that works on it. `times`: JSON, UNIX times by state. `tries`: processes that have died
-- while they had it.
CREATE TABLE IF NOT EXISTS batches(
  id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE,
  caller BLOB NOT NULL,
  owner TEXT NOT NULL,
  state TEXT NOT NULL,
  path TEXT NOT NULL,
  input_file TEXT NOT NULL,
  created INTEGER NOT NULL,
  expires REAL NOT NULL,  -- by the store's clock
  metadata BLOB NOT NULL,
  times TEXT NOT NULL DEFAULT '{}',
  errors BLOB,
  total INTEGER NOT NULL DEFAULT 0,
  succeeded INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0,
  tries INTEGER NOT NULL DEFAULT 0,
  output_file TEXT,
  error_file TEXT);
CREATE INDEX IF NOT EXISTS batches_by_caller ON batches(caller);
CREATE INDEX IF NOT EXISTS open_batches ON batches(state) WHERE state IN ('validating', 'in_progress', 'cancelling');
-- The requests that have no answer yet. `start`, `size`: of the body in the input file. `tries`: processes that have
-- died while they had it. `running`: the batch's owner has it.
CREATE TABLE IF NOT EXISTS batch_lines(
  batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE,
  number INTEGER NOT NULL,
  custom_id TEXT NOT NULL,
  start INTEGER NOT NULL,
  size INTEGER NOT NULL,
  tries INTEGER NOT NULL DEFAULT 0,
  running INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (batch, number),
  UNIQUE (batch, custom_id)) WITHOUT ROWID;
-- The tokens and answers of each key, by its name, and by day since 1970 (UTC). Cached tokens are among the prompt's.
CREATE TABLE IF NOT EXISTS key_usage(
  key TEXT NOT NULL,
  day INTEGER NOT NULL,
  requests INTEGER NOT NULL,
  prompt INTEGER NOT NULL,
  cached INTEGER NOT NULL,
  generated INTEGER NOT NULL,
  PRIMARY KEY (key, day)) WITHOUT ROWID;
-- The requests of each key with a limit that began in its latest minute since 1970.
CREATE TABLE IF NOT EXISTS key_minutes(
  key TEXT PRIMARY KEY,
  minute INTEGER NOT NULL,
  count INTEGER NOT NULL) WITHOUT ROWID;
-- The log lines of answers that are counted, until they are written. `owner`: the HTTP process that writes it.
CREATE TABLE IF NOT EXISTS usage_lines(
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  owner TEXT NOT NULL,
  line BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS usage_lines_by_owner ON usage_lines(owner, number);
"""
# The statements that come before the schema in a file of an earlier version than this one.
_CHANGES = {
    5: """
ALTER TABLE responses RENAME COLUMN response TO head;
ALTER TABLE responses ADD COLUMN output BLOB NOT NULL DEFAULT x'5b5d';
UPDATE responses SET output = CAST(json_extract(CAST(head AS TEXT), '$.output') AS BLOB),
                     head = CAST(json_remove(CAST(head AS TEXT), '$.output') AS BLOB);
ALTER TABLE items ADD COLUMN caller BLOB NOT NULL DEFAULT x'';
UPDATE items SET caller = (SELECT caller FROM kept WHERE id = conversation);
DROP INDEX IF EXISTS items_by_id;
""",
    # Files and batches were kept in other tables; those of earlier versions are dropped.
    7: """
DELETE FROM kept WHERE id LIKE 'file-%' OR id LIKE 'batch\\_%' ESCAPE '\\';
DROP TABLE IF EXISTS batch_results;
DROP TABLE IF EXISTS batches;
DROP TABLE IF EXISTS files;
""",
    # The records of jobs, and the keys of requests, had another form: those of earlier versions are dropped.
    8: """
DELETE FROM kept WHERE id IN (SELECT id FROM jobs) AND id NOT IN (SELECT id FROM responses);
DROP TABLE IF EXISTS idempotency;
DROP TABLE IF EXISTS job_outputs;
DELETE FROM jobs;
""",
    9: "ALTER TABLE jobs ADD COLUMN input BLOB NOT NULL DEFAULT x'5b5d';\n",
}

# `struct flock` of 64-bit Linux: type, whence, first byte, number of bytes, process.
_LOCK = struct.Struct("@hhqqi4x")
_NUM_PLACES = 2**61  # bytes of the file that HTTP processes lock, and as many behind them for services
_NETWORK = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
)


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
    """Make the file and its folder if they are not there. Raise StoreError."""
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
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if version > VERSION or (num_tables and version < 1):
        raise StoreError(f"The response store {path} was not written by this version of moeserve: name another file.")
    changes = [change for of, change in sorted(_CHANGES.items()) if num_tables and of > version]
    for statement in _statements("".join([*changes, _SCHEMA])):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


class Locks:
    """The file's locks, as one process sees and holds them. It has one byte for each number; none is ever written."""

    def __init__(self, store: Path) -> None:
        # An open file description of its own: SQLite's locks are on the store itself, and of another kind.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(store.with_name(f"{store.name}-owners"), flags, 0o600)

    def close(self) -> None:
        os.close(self._file)

    def own(self, number: int) -> None:
        """Lock the place of HTTP process `number`. Raise BlockingIOError if another process has it."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number % _NUM_PLACES, 1, 0))

    def is_owned(self, number: int) -> bool:
        """Return whether another process holds the place of an HTTP process."""
        return self._is_locked(number % _NUM_PLACES, 1)

    def join(self, kind: int) -> bool:
        """Share the place of services of a kind with other services of the kind; return False if a service of another
        kind uses the file."""
        place = kind % _NUM_PLACES
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _NUM_PLACES + place, 1, 0))
        behind = _NUM_PLACES - place - 1
        return not (
            (place and self._is_locked(_NUM_PLACES, place))
            or (behind and self._is_locked(_NUM_PLACES + place + 1, behind))
        )

    def _is_locked(self, first: int, number: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, number, 0)
        found: bytes = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def network_of(path: Path, mounts: str) -> str | None:
    """Return the type of the network file system that a path is on, None for another one.

    mounts: of /proc/self/mountinfo.
    """
    best, found = -1, None
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        mounted = Path(fields.split(" ")[4].encode().decode("unicode_escape"))
        if len(mounted.parts) >= best and path.is_relative_to(mounted):
            best, found = len(mounted.parts), source.split(" ")[0]
    return found if found in _NETWORK else None


class Owner:
    """This process as an owner of jobs. Others read its `name` in the store."""

    def __init__(self, store: Path) -> None:
        self.name = secrets.token_hex(8)
        self._store = store
        self._locks: Locks | None = None

    def hold(self) -> None:
        self._locks = Locks(self._store)
        self._locks.own(int(self.name, 16))

    def is_dead(self, name: str) -> bool:
        """Return whether another owner has ended. This process must own jobs."""
        assert self._locks is not None
        return name != self.name and not self._locks.is_owned(int(name, 16))

    def release(self) -> None:
        """Let others take over."""
        if self._locks is not None:
            self._locks.close()
            self._locks = None
