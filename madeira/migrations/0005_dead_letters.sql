-- Dead letters, for those who look through them.

-- The code of the last failure, as the log has it, so that dead letters are grouped and searched without their logs. Settle writes
-- it beside last_error, into a row that it rewrites anyway; the log, written by the same statement, checks how it is spelt.
ALTER TABLE delivery ADD COLUMN last_error_code text COLLATE "C";

UPDATE delivery d
SET last_error_code = coalesce(
    (SELECT l.error_code FROM delivery_log l
     WHERE l.delivery_id = d.id AND l.outcome <> 'late' ORDER BY l.id DESC LIMIT 1),
    -- Born dead, without any attempt: routing puts the code before its reason.
    substring(d.last_error FROM '^([a-z][a-z_]*): '))
WHERE d.died_at IS NOT NULL;

-- The latest first: of all, and of an endpoint. Only what is dead is in them, and no claim touches what they hold: claims stay HOT.
-- What is counted by groups is found in the index alone.
CREATE INDEX delivery_died ON delivery (died_at, id) INCLUDE (endpoint, last_error_code) WHERE died_at IS NOT NULL;
CREATE INDEX delivery_died_of ON delivery (endpoint, died_at, id) WHERE died_at IS NOT NULL;
DROP INDEX delivery_dead;


-- Of an attempt that failed: the request as it was made (credentials and signatures hidden, the body by its length and digest),
-- and the headers of what came back, bounded. JSON that is never looked into here, so it is not taken apart either.
ALTER TABLE delivery_log ADD COLUMN exchange json;
