"""Keys of deliveries by number: made, queued, looked for, and kept by a process as its heartbeat says."""

from madeira.broker.queues import DELIVER, ROUTE, Ensure, Held, Queues
from tests.broker.conftest import Player


def key(n: int, name: str = "a") -> str:
    return f"{n}:{n}:{name}"


def ensure(queues: Queues, *keys: str, delay_s: float = 0.0) -> int:
    return queues.ensure([Ensure(DELIVER, k, delay_s) for k in keys])


def kinds(queues: Queues, *keys: str, queue: str = DELIVER) -> list[str]:
    return [place.kind for place in queues.where(queue, keys)]


def beat(queues: Queues, name: str, *held: Held, silence_s: float = 60.0) -> tuple[int, int, int, int]:
    return queues.beat(name, silence_s=silence_s, spread_s=0.0, queues=[ROUTE, DELIVER], held=held)


def held(player: Player, k: str, *, lease_s: float = 40.0, renew: bool = False) -> Held:
    queue, token = player.hands[k]
    return Held(queue, k, token, lease_s, renew)
