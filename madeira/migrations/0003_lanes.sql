-- Endpoints that somebody holds: what waits for them stays where it is.

-- Beside the configuration, not in it: a file that is applied again does not let an endpoint go that a person has paused.
ALTER TABLE endpoint
    ADD COLUMN state text NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused', 'disabled')),
    -- Why it is held.
    ADD COLUMN state_reason text,
    -- Since when it is as it is, and by whom; NULL while it was never anything else.
    ADD COLUMN state_since timestamptz,
    ADD COLUMN state_by text,
    ADD CONSTRAINT endpoint_held_for_a_reason CHECK ((state = 'active') = (state_reason IS NULL)),
    ADD CONSTRAINT endpoint_held_by_somebody CHECK (state = 'active' OR (state_since IS NOT NULL AND state_by IS NOT NULL));
