"""What is kept no longer, removed for so long as one is told to: a process of its own, as a worker is.

Each line of its input is a number of seconds; it removes for as long, and answers with one line of JSON: ``counts`` by kind, and
``over`` when nothing is left.
"""

import json
import sys
import time
from collections import Counter

import dramatiq

from madeira import settings
from madeira.broker import build
from madeira.store import retention
from madeira.store.database import Database

values = settings.load()
dramatiq.set_broker(build(values))

from actors.retention import run  # noqa: E402


def turn(database: Database, seconds: float) -> tuple[Counter[str], bool]:
    """Remove for `seconds` as the actor does; what went, and whether nothing is left."""
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    while (left_s := until - time.monotonic()) > 0:
        counts += run(database, retention.ages_of(values), turn_s=left_s)
        with database.connection() as conn:
            waits_s = retention.waits_s(conn)
        if waits_s is None and time.monotonic() < until:
            return counts, True
        time.sleep(max(0.0, min((waits_s or 0.0) + 0.1, until - time.monotonic())))
    return counts, False


def main() -> None:
    """Answer each line."""
    database = Database(url=values.database_url, application="retention", pool_max=2)
    database.open()
    for line in sys.stdin:
        counts, over = turn(database, float(line))
        print(json.dumps({"counts": counts, "over": over}), flush=True)


if __name__ == "__main__":
    main()
