CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE orders_done (agent TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE fences (job TEXT PRIMARY KEY, number INTEGER NOT NULL, at INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE sandboxes (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, number INTEGER NOT NULL,
    owner TEXT NOT NULL, user TEXT NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL, shared_uid INTEGER NOT NULL,
    startd TEXT NOT NULL, slot_id INTEGER NOT NULL, dslot_id INTEGER NOT NULL, slot_name TEXT NOT NULL,
    priority INTEGER NOT NULL, state INTEGER NOT NULL, change INTEGER NOT NULL, paused INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '', error_code INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, excused INTEGER NOT NULL DEFAULT 0,
    named_tickets TEXT NOT NULL DEFAULT '', named_files INTEGER NOT NULL DEFAULT 0,
    accepted_at INTEGER NOT NULL, confirmed_at INTEGER NOT NULL DEFAULT 0, ended_at INTEGER NOT NULL DEFAULT 0,
    forgettable INTEGER NOT NULL DEFAULT 0,
    UNIQUE (job, number));
CREATE TABLE tickets (
    id INTEGER PRIMARY KEY, ticket TEXT NOT NULL UNIQUE, sandbox INTEGER NOT NULL, plugin TEXT NOT NULL,
    boot TEXT NOT NULL, synced INTEGER NOT NULL DEFAULT 0, freed INTEGER NOT NULL DEFAULT 0,
    files INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE INDEX tickets_of ON tickets (sandbox);
CREATE TABLE destinations (
    id INTEGER PRIMARY KEY, plugin TEXT NOT NULL, scheme TEXT NOT NULL, host TEXT NOT NULL,
    UNIQUE (plugin, scheme, host));
CREATE TABLE files (
    ticket INTEGER NOT NULL, position INTEGER NOT NULL, sandbox INTEGER NOT NULL, destination INTEGER NOT NULL,
    state INTEGER NOT NULL, next_attempt INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL,
    url TEXT NOT NULL, name TEXT NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL, device INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, excused INTEGER NOT NULL DEFAULT 0, error_code INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '', verified TEXT NOT NULL DEFAULT '', digest TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (ticket, position)) WITHOUT ROWID;
CREATE INDEX files_due ON files (sandbox, state, destination, next_attempt, size);
CREATE INDEX files_troubled ON files (sandbox, state) WHERE error_code != 0;
CREATE TABLE sums (
    sandbox INTEGER NOT NULL, destination INTEGER NOT NULL, state INTEGER NOT NULL,
    files INTEGER NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (sandbox, destination, state)) WITHOUT ROWID;
CREATE TRIGGER sums_insert AFTER INSERT ON files BEGIN
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
CREATE TRIGGER sums_update AFTER UPDATE OF state ON files WHEN NEW.state != OLD.state BEGIN
    UPDATE sums SET files = files - 1, size = size - OLD.size
    WHERE sandbox = OLD.sandbox AND destination = OLD.destination AND state = OLD.state;
    INSERT INTO sums VALUES (NEW.sandbox, NEW.destination, NEW.state, 1, NEW.size)
    ON CONFLICT DO UPDATE SET files = files + 1, size = size + NEW.size;
END;
PRAGMA user_version = 1;
