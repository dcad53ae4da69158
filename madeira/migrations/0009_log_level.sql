-- The level of the log, for all processes: they ask for the version of the configuration every second, and for this with it.
ALTER TABLE configuration
    -- NULL: each process has that of its environment.
    ADD COLUMN log_level text CHECK (log_level IN ('debug', 'info', 'warning', 'error')),
    -- Until when it holds; NULL: until it is changed.
    ADD COLUMN log_level_until timestamptz;
