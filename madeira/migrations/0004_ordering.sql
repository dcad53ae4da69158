-- The order of deliveries: one after another per endpoint, or per key within an endpoint.
--
-- `ordering_key` is set once, by routing, and only where the endpoint asks for an order. Deliveries without one must not pay:
-- Postgres writes no index for an update that changes no column which any index of the table mentions, be it in a predicate
-- only. So no index here looks at status or claim_token, which every claim changes.

ALTER TABLE delivery ALTER COLUMN ordering_key TYPE text COLLATE "C";

-- The key while a claim holds the delivery; NULL before and after, and always without a key.
ALTER TABLE delivery ADD COLUMN claimed_key text COLLATE "C"
    GENERATED ALWAYS AS (CASE WHEN claim_token IS NOT NULL THEN ordering_key END) STORED;

-- Of one key at most one is held. The claim looks before, and this decides between two that look at the same instant.
CREATE UNIQUE INDEX delivery_one_per_key ON delivery (endpoint, claimed_key) WHERE claimed_key IS NOT NULL;

-- What is unfinished of a key, in its order.
CREATE INDEX delivery_in_order ON delivery (endpoint, ordering_key, event_seq)
    WHERE ordering_key IS NOT NULL AND finished_at IS NULL;

-- Events that wait for their routing: those to be routed at once, and those that came with a time. The predicate and the
-- expression are written so that neither index is taken for another one, nor another one for them, by a plan that was made
-- while the table was empty.
CREATE INDEX event_unrouted_now ON event ((seq + 0)) WHERE (route_at IS NULL) IS FALSE AND deliver_at IS NULL;
CREATE INDEX event_unrouted_later ON event (route_at) WHERE (route_at IS NULL) IS FALSE AND deliver_at IS NOT NULL;

-- The first delivery of a key: the one that is held, else the unfinished one whose event was accepted first. A function, and so
-- are those that follow, because Postgres would otherwise plan every claim anew, ordered or not, for fear of what it might cost;
-- they see what the statement sees that calls them.
CREATE FUNCTION first_of_key(of_endpoint text, of_key text) RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 1 AS $$
BEGIN
    RETURN coalesce(
        (SELECT id FROM delivery WHERE endpoint = of_endpoint AND claimed_key = of_key),
        (SELECT id FROM delivery
         WHERE endpoint = of_endpoint AND ordering_key = of_key AND finished_at IS NULL
         ORDER BY event_seq LIMIT 1));
END $$;

-- Whether a route leads from a source to an endpoint. What it asks of an event beyond that is not looked at.
CREATE FUNCTION may_reach(of_source text, of_endpoint text) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 1 AS $$
BEGIN
    RETURN EXISTS (SELECT FROM route
                   WHERE spec ->> 'endpoint' = of_endpoint AND coalesce(spec ->> 'source', of_source) = of_source);
END $$;

-- An event that was accepted before this one, is due, is not routed yet, and may lead to the same endpoint.
CREATE FUNCTION unrouted_before(of_seq bigint, of_endpoint text) RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 1 AS $$
BEGIN
    RETURN coalesce(
        (SELECT seq FROM event
         WHERE seq + 0 < of_seq AND (route_at IS NULL) IS FALSE AND deliver_at IS NULL AND may_reach(source, of_endpoint)
         ORDER BY seq + 0 LIMIT 1),
        (SELECT seq FROM event
         WHERE route_at <= now() AND (route_at IS NULL) IS FALSE AND deliver_at IS NOT NULL AND seq < of_seq
               AND may_reach(source, of_endpoint)
         ORDER BY route_at LIMIT 1));
END $$;
