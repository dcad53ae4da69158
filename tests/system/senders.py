"""Those who send to the doors of several hosts: each goes on until its event is accepted, by whichever door."""

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from tests.system.harness import Madeira, threading_wait
from tests.system.hosts import API_PORT

#: Events a second that any sender posts, and those that one sender posts one after another, for the ordered lane.
RATE: Final = 15
ORDERED_RATE: Final = 2

#: Seconds after which a sender gives an answer up, and posts the event again, to the other door.
SENDER_PATIENCE_S: Final = 3.0

#: Threads that post: with a door that answers nothing until it is given up, the rate still holds.
SENDERS: Final = 40


@dataclass(frozen=True, slots=True)
class Said:
    """What a sender heard for one post."""

    door: str
    #: The status, or the name of the error.
    answer: str
    #: When it was posted, Unix seconds.
    at: float
    took_s: float


class Senders:
    """Post events to the `doors`, each until it is accepted: to the next door after every answer that is no 2xx, or none."""

    def __init__(self, madeira: Madeira, doors: Sequence[str]) -> None:
        self._madeira = madeira
        self._doors = doors
        self._numbers = count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.said: list[Said] = []
        #: Ids of the events that were answered 202 or 200.
        self.accepted: list[str] = []
        self._begun = time.monotonic()
        self._threads = [threading.Thread(target=self._run_any, daemon=True) for _ in range(SENDERS)]
        self._threads.append(threading.Thread(target=self._run_ordered, daemon=True))
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Begin no event any more, and wait for those that were begun."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a sender still tries"

    def heard(self, door: str, since: float, until: float) -> list[Said]:
        """What came from a door for what was posted between the two moments."""
        with self._lock:
            return [said for said in self.said if said.door == door and since <= said.at < until]

    def _run_any(self) -> None:
        while True:
            with self._lock:
                number = next(self._numbers)
            if not self._post_at(number, number / RATE, "a", number):
                return

    def _run_ordered(self) -> None:
        for number in count():
            if not self._post_at(number, number / ORDERED_RATE, "o", number // 20):
                return

    def _post_at(self, number: int, at: float, kind: str, door: int) -> bool:
        """Post an event when it is time; False when it is time to end."""
        if self._stop.wait(max(0.0, self._begun + at - time.monotonic())):
            return False
        event = f"{kind}-{number}"
        body = json.dumps({"event_id": event, "event_type": f"{kind}.b", "payload": {"n": number}}).encode()
        for turn in count(door):
            if self._post(self._doors[turn % len(self._doors)], body):
                with self._lock:
                    self.accepted.append(event)
                return True
            threading_wait(0.1)
        raise AssertionError

    def _post(self, door: str, body: bytes) -> bool:
        at, started = time.time(), time.monotonic()
        connection = http.client.HTTPConnection(door, API_PORT, timeout=SENDER_PATIENCE_S)
        try:
            connection.request("POST", "/v1/events", body, self._madeira.sign(body))
            answer = str(connection.getresponse().status)
        except (OSError, http.client.HTTPException) as e:
            answer = type(e).__name__
        finally:
            connection.close()
        with self._lock:
            self.said.append(Said(door, answer, at, time.monotonic() - started))
        return answer in ("200", "202")
