"""The part of a statement that carries moved deliveries over into their events' counts.

Used inside any statement that ends deliveries. It needs two parts before it: one that has locked the events (ascending)
and one named ``moved`` (event_seq, status, retries) with the deliveries that left an unfinished state or stayed in one.
The counts are summed per event first: an UPDATE … FROM applies only one of several source rows to a target row.
"""

from typing import Final

#: Sums the moved deliveries per event and derives the event's state from its counts.
COUNTED: Final = """
    counted AS (
        UPDATE event e
        SET unfinished = e.unfinished - s.ended,
            dead = e.dead + s.dead,
            cancelled = e.cancelled + s.cancelled,
            status = event_status_of(e.unfinished - s.ended, e.dead + s.dead, e.cancelled + s.cancelled),
            retry_count = greatest(e.retry_count, s.retries),
            updated_at = clock_timestamp()
        FROM (SELECT event_seq,
                     count(*) FILTER (WHERE status <> 'pending')::integer AS ended,
                     count(*) FILTER (WHERE status = 'dead')::integer AS dead,
                     count(*) FILTER (WHERE status = 'cancelled')::integer AS cancelled,
                     max(retries) AS retries
              FROM moved GROUP BY event_seq) s
        WHERE e.seq = s.event_seq
        RETURNING e.seq, e.status, e.created_at)
"""
