"""The tables of a ledger and the views over them. Any SQLite tool can read them, old ones too."""

from __future__ import annotations

from typing import Final

SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- origin: who reported it, if somebody did; the same report changes nothing a second time.
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, job TEXT, body TEXT NOT NULL,
    origin TEXT UNIQUE);
CREATE TABLE commands (
    seq INTEGER NOT NULL REFERENCES events, place INTEGER NOT NULL, kind TEXT NOT NULL, job TEXT, body TEXT NOT NULL,
    PRIMARY KEY (seq, place)) WITHOUT ROWID;
CREATE INDEX events_of_job ON events (job) WHERE job IS NOT NULL;

-- Every start of every job, with what ended it.
CREATE VIEW incarnations AS
SELECT s.job,
       json_extract(s.body, '$.attempt') AS attempt,
       s.at - json_extract(s.body, '$.ago') - json_extract(s.body, '$.lingered') AS started_at,
       json_extract(s.body, '$.lingered') AS lingered,
       json_extract(s.body, '$.admission_delay') AS admission_delay,
       s.at - json_extract(s.body, '$.ago') - json_extract(s.body, '$.lingered')
         - json_extract(s.body, '$.admission_delay') AS eligible_at,
       json_extract(s.body, '$.bound') AS bound,
       (SELECT min(e.at) FROM events e WHERE e.job = s.job AND e.seq > s.seq
         AND e.kind IN ('JobEnded', 'JobFailed', 'JobRequeued')) AS stopped_at,
       (SELECT json_extract(e.body, '$.held_seconds') FROM events e WHERE e.job = s.job AND e.seq > s.seq
         AND e.kind IN ('JobEnded', 'JobFailed', 'JobRequeued') ORDER BY e.seq LIMIT 1) AS held_seconds
FROM events s WHERE s.kind = 'JobStarted';

-- Every job we ordered; times and figures of its newest attempt.
CREATE VIEW jobs AS
SELECT c.job,
       json_extract(c.body, '$.order.facility') AS facility,
       json_extract(c.body, '$.order.round') AS round,
       json_extract(c.body, '$.order.purpose') AS purpose,
       json_extract(c.body, '$.order.wall_seconds') AS wall_seconds,
       json_extract(c.body, '$.order.expected_delay') AS expected_delay,
       json_extract(c.body, '$.order.replaces') AS replaces,
       o.at AS ordered_at,
       (SELECT e.at FROM events e WHERE e.job = c.job AND e.kind = 'JobSubmitted') AS submitted_at,
       (SELECT i.started_at FROM incarnations i WHERE i.job = c.job
         ORDER BY i.attempt DESC LIMIT 1) AS started_at,
       (SELECT i.admission_delay FROM incarnations i WHERE i.job = c.job
         ORDER BY i.attempt DESC LIMIT 1) AS admission_delay,
       (SELECT e.at FROM events e WHERE e.job = c.job AND e.kind = 'JobEnded'
         ORDER BY e.seq DESC LIMIT 1) AS ended_at,
       (SELECT e.at FROM events e WHERE e.job = c.job AND e.kind = 'UpdateArrived'
         ORDER BY e.seq LIMIT 1) AS arrived_at,
       (SELECT json_extract(e.body, '$.steps_done') FROM events e WHERE e.job = c.job AND e.kind = 'JobEnded'
         ORDER BY e.seq DESC LIMIT 1) AS steps_done,
       (SELECT json_extract(e.body, '$.reason') FROM events e WHERE e.job = c.job
         AND e.kind IN ('JobFailed', 'SubmitRefused', 'UpdateRejected') ORDER BY e.seq DESC LIMIT 1) AS failure
FROM commands c JOIN events o USING (seq) WHERE c.kind = 'SubmitJob';

-- Each update and its one fate.
CREATE VIEW updates AS
SELECT json_extract(c.body, '$.facts.job') AS job,
       json_extract(c.body, '$.facts.attempt') AS attempt,
       coalesce(json_extract(c.body, '$.facts.part'), 0) AS part,
       e.at AS settled_at,
       json_extract(c.body, '$.facts.fate') AS fate,
       json_extract(c.body, '$.facts.deferred') AS deferred,
       json_extract(c.body, '$.facts.staleness') AS staleness,
       json_extract(c.body, '$.facts.weight') AS weight,
       json_extract(c.body, '$.facts.version') AS version,
       json_extract(c.body, '$.facts.reason') AS reason
FROM commands c JOIN events e USING (seq) WHERE c.kind = 'Record' AND json_extract(c.body, '$.kind') = 'fate';

CREATE VIEW models AS
SELECT json_extract(e.body, '$.version') AS version, e.at AS ready_at FROM events e WHERE e.kind = 'ModelReady';

CREATE VIEW scores AS
SELECT json_extract(e.body, '$.version') AS version,
       e.at AS scored_at,
       json_extract(e.body, '$.metrics.score') AS score,
       json_extract(e.body, '$.metrics.loss') AS loss
FROM events e WHERE e.kind = 'ModelScored';
"""
