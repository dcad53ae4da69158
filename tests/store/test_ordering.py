"""Order: of an endpoint and key one delivery after another, in the order in which their events were accepted."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from threading import Barrier, Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from madeira.records import Claimed, DeliveryRef, PlannedDelivery, Refused
from madeira.states import MAX_LOST
from madeira.store import cancelling, erase, events, ordering, reconcile, replay
from madeira.store.database import Database
from madeira.store.deliveries import ClaimRequest, claim, settle
from tests.store.making import (
    GIVE_UP,
    RETRY,
    SUCCESS,
    Connection,
    accept,
    claimed,
    counts_agree,
    delivery,
    event,
    expire,
    make_due,
    settled,
    token,
    verdict,
)
from tests.store.waiting import at_once, good, until, waits_for_a_lock

LATER = timedelta(hours=1)


#: Route -> its source (None: any) and its endpoint.
ROUTES = {"r": ("shop", "a"), "s": ("second", "a"), "t": ("other", "b"), "u": (None, "c")}


@pytest.fixture(autouse=True)
def routes(conn: Connection) -> None:
    """Which sources lead where."""
    for name, (source, endpoint) in ROUTES.items():
        spec = {"endpoint": endpoint} | ({"source": source} if source else {})
        conn.execute("INSERT INTO route (name, spec) VALUES (%s, %s)", (name, Jsonb(spec)))


def route(conn: Connection, seq: int, key: str | None = "k", endpoint: str = "a") -> DeliveryRef:
    """Route an accepted event to one endpoint under an ordering key."""
    [ref] = events.route(conn, [(seq, [PlannedDelivery(endpoint, endpoint, ("r",), ordering_key=key)])])[0].refs
    return ref


def born(conn: Connection, key: str | None = "k", endpoint: str = "a", **fields: Any) -> DeliveryRef:
    """A pending delivery of an event of its own."""
    return route(conn, accept(conn, **fields), key, endpoint)


def ask(conn: Connection, ref: DeliveryRef) -> Claimed | Refused:
    [answer] = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0)])
    return answer


def refused(conn: Connection, ref: DeliveryRef) -> Refused:
    answer = ask(conn, ref)
    assert isinstance(answer, Refused), answer
    return answer


def may_go(conn: Connection, ref: DeliveryRef) -> bool:
    return isinstance(ask(conn, ref), Claimed)


def id_of(ref: DeliveryRef | None) -> int | None:
    return None if ref is None else ref.delivery_id


def play_again(conn: Connection, ref: DeliveryRef) -> DeliveryRef:
    """Replay the event of a delivery, as a person does."""
    row = event(conn, ref.seq)
    result = replay.replay(conn, row["source"], row["event_id"], "ann", "mended")
    assert result is not None
    return result.refs[0]


def cancel(conn: Connection, ref: DeliveryRef) -> None:
    row = event(conn, ref.seq)
    cancelling.cancel(conn, row["source"], row["event_id"], "ann", None)


def retrying(conn: Connection, ref: DeliveryRef) -> None:
    settled(conn, claimed(conn, ref), RETRY)


def taken(conn: Connection, ref: DeliveryRef) -> None:
    claimed(conn, ref)


def run_out(conn: Connection, ref: DeliveryRef) -> None:
    claimed(conn, ref)
    expire(conn, ref.delivery_id)


def succeeded(conn: Connection, ref: DeliveryRef) -> None:
    settled(conn, claimed(conn, ref), SUCCESS)


def died(conn: Connection, ref: DeliveryRef) -> None:
    settled(conn, claimed(conn, ref), GIVE_UP)


def untouched(conn: Connection, ref: DeliveryRef) -> None:
    """Leave it pending and due."""


# -- what a claim may have -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("happened", "goes"),
    [(untouched, False), (retrying, False), (taken, False), (run_out, False), (succeeded, True), (died, True), (cancel, True)],
)
@pytest.mark.parametrize(
    ("key", "endpoint", "same"), [("k", "a", True), ("other", "a", False), ("k", "b", False), (None, "a", False)]
)
def test_a_delivery_goes_when_none_before_it_in_its_key_is_unfinished(
    conn: Connection,
    happened: Callable[[Connection, DeliveryRef], None],
    goes: bool,
    key: str | None,
    endpoint: str,
    same: bool,
) -> None:
    """A retry keeps its place, however long it waits; what ended lets the next one go. Other keys and endpoints are free."""
    earlier, later = born(conn), born(conn, key, endpoint)
    happened(conn, earlier)
    if goes or not same:
        assert may_go(conn, later)
        return
    answer = refused(conn, later)
    assert answer.reason == "behind"
    held = happened is taken
    assert id_of(answer.first) == (None if held else earlier.delivery_id), "what is held needs no queueing"


def test_what_is_behind_hears_when_the_first_is_due(conn: Connection) -> None:
    """So that queueing it does not bring its retry forward."""
    earlier, later = born(conn), born(conn)
    retrying(conn, earlier)
    first = refused(conn, later).first
    assert first is not None
    assert (first.delivery_id, first.seq, first.lane, first.line) == (earlier.delivery_id, earlier.seq, "a", "retry")
    assert 50 < first.delay_s <= 60


def test_a_whole_key_goes_in_the_order_of_acceptance_whatever_the_order_of_routing(conn: Connection) -> None:
    """Routed backwards, claimed in any order: each time exactly the next one is granted."""
    seqs = [accept(conn) for _ in range(6)]
    refs = [route(conn, seq) for seq in reversed(seqs)]
    went = []
    while len(went) < len(seqs):
        answers = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in refs])
        [held] = [a for a in answers if isinstance(a, Claimed)]
        went.append(held.seq)
        settled(conn, held)
    assert went == seqs


def reroute(conn: Connection, seq: int) -> None:
    """An event that found no route is to be routed again."""
    events.route(conn, [(seq, [])])
    row = event(conn, seq)
    assert replay.reroute(conn, row["source"], row["event_id"], "ann", "mended")


def unroutable(conn: Connection, seq: int) -> None:
    for _ in range(10):
        events.count_route_failure(conn, seq)


def has_come_due(conn: Connection, seq: int) -> None:
    conn.execute("UPDATE event SET route_at = clock_timestamp() - interval '0.3 s' WHERE seq = %s", (seq,))


def cancel_event(conn: Connection, seq: int) -> None:
    cancelling.cancel(conn, "shop", event(conn, seq)["event_id"], "ann", None)


def wait_on(conn: Connection, seq: int) -> None:
    """Leave it as it was accepted."""


@pytest.mark.parametrize(
    ("fields", "happened", "blocks"),
    [
        ({}, wait_on, True),
        ({}, reroute, True),
        ({}, cancel_event, False),
        ({}, unroutable, False),
        ({"source": "second"}, wait_on, True),
        ({"source": "other"}, wait_on, False),
        ({"deliver_at": datetime.now(UTC) + LATER}, wait_on, False),
        ({"deliver_at": datetime.now(UTC) + LATER}, has_come_due, True),
        ({"deliver_at": datetime.now(UTC) + LATER, "source": "second"}, has_come_due, True),
        ({"deliver_at": datetime.now(UTC) + LATER, "source": "other"}, has_come_due, False),
    ],
    ids=[
        *("waits", "rerouted", "cancelled", "unroutable", "of a second source", "of a source that leads elsewhere"),
        *("not due", "due", "due of a second source", "due of a source that leads elsewhere"),
    ],
)
def test_a_delivery_waits_for_the_routing_of_what_came_before(
    conn: Connection, fields: dict[str, Any], happened: Callable[[Connection, int], None], blocks: bool
) -> None:
    """If a route leads from its source to the endpoint, and it is due: nobody knows yet whether it is the first of a key."""
    earlier = accept(conn, **fields)
    happened(conn, earlier)
    ref = born(conn)
    if not blocks:
        assert may_go(conn, ref)
        return
    answer = refused(conn, ref)
    assert (answer.reason, answer.first) == ("unrouted", None)
    assert 0.1 <= answer.delay_s <= 1.0
    events.route(conn, [(earlier, [PlannedDelivery("b", "b")])])
    assert may_go(conn, ref)


def test_what_came_later_need_not_be_routed(conn: Connection) -> None:
    ref = born(conn)
    accept(conn)
    assert may_go(conn, ref)


def test_a_route_without_a_source_leads_from_every_source(conn: Connection) -> None:
    accept(conn, source="whoever")
    assert refused(conn, born(conn, endpoint="c")).reason == "unrouted"


def test_what_has_no_key_waits_for_nothing(conn: Connection) -> None:
    """Neither for deliveries nor for the routing of events."""
    accept(conn)
    born(conn)
    assert may_go(conn, born(conn, None))


def test_the_longer_routing_takes_the_longer_one_waits(conn: Connection) -> None:
    """A tenth of a second for what came just now, a second for what is stuck."""
    earlier = accept(conn)
    ref = born(conn)
    assert refused(conn, ref).delay_s < 1.0
    conn.execute("UPDATE event SET route_at = clock_timestamp() - interval '1 h' WHERE seq = %s", (earlier,))
    assert refused(conn, ref).delay_s == 1.0


# -- takeovers and replays -------------------------------------------------------------------------------------------


def test_a_takeover_keeps_its_place(conn: Connection) -> None:
    """The one whose worker died is called again before anything else of its key."""
    first, second = born(conn), born(conn)
    run_out(conn, first)
    assert id_of(refused(conn, second).first) == first.delivery_id
    settled(conn, claimed(conn, first))
    assert may_go(conn, second)


def test_what_was_begun_is_taken_over_before_what_was_replayed_in_front_of_it(conn: Connection) -> None:
    """Else the two would wait for each other: its call may have been made already."""
    first, second = born(conn), born(conn)
    died(conn, first)
    run_out(conn, second)
    play_again(conn, first)
    answer = refused(conn, first)
    assert (answer.reason, id_of(answer.first)) == ("behind", second.delivery_id)
    assert id_of(settled(conn, claimed(conn, second)).first) == first.delivery_id
    assert may_go(conn, first)


def test_a_replayed_one_goes_by_its_seq_among_the_unfinished(conn: Connection) -> None:
    """Before those that came later, behind those that came earlier, after the one that is in hand."""
    one, two, three, four = (born(conn) for _ in range(4))
    died(conn, one)
    died(conn, two)
    held = claimed(conn, three)
    assert ordering.leading(conn, [play_again(conn, two)]) == [], "what is in hand ends first"
    assert ordering.leading(conn, [play_again(conn, one)]) == []
    for ref, follows in ((one, one), (two, two), (four, four)):
        now = settled(conn, held)
        assert id_of(now.first) == follows.delivery_id
        for other in {one, two, four} - {ref}:
            assert not may_go(conn, other)
        held = claimed(conn, ref)
    assert settled(conn, held).first is None


def test_dead_letters_replayed_in_any_order_go_in_the_order_of_acceptance(conn: Connection) -> None:
    refs = [born(conn) for _ in range(10)]
    for ref in refs:
        died(conn, ref)
    chance = Random(46)
    for ref in chance.sample(refs, len(refs)):
        play_again(conn, ref)
    went: list[int] = []
    while len(went) < len(refs):
        free = [a for ref in chance.sample(refs, len(refs)) if isinstance(a := ask(conn, ref), Claimed)]
        assert len(free) == 1
        settled(conn, free[0], RETRY if len(went) == 3 and free[0].failures == 0 else SUCCESS)
        if delivery(conn, free[0].delivery_id)["status"] == "pending":
            make_due(conn, free[0].delivery_id)
        else:
            went.append(free[0].seq)
    assert went == [ref.seq for ref in refs]
    assert counts_agree(conn)


# -- who comes next --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decision", "follows"), [(SUCCESS, True), (GIVE_UP, True), (RETRY, False)])
def test_a_settle_tells_who_comes_next(conn: Connection, decision: Any, follows: bool) -> None:
    """A success or a death lets the next one go, a retry keeps its place; also when the reply was lost and it is asked again."""
    first, second = born(conn), born(conn)
    born(conn)
    request = verdict(claimed(conn, first), decision)
    for _ in range(2):
        [answer] = settle(conn, [request])
        assert id_of(answer.first) == (second.delivery_id if follows else None)


def test_a_retry_tells_of_what_was_replayed_in_front_of_it(conn: Connection) -> None:
    """It was refused while this one was in hand, and would be nowhere."""
    first, second = born(conn), born(conn)
    died(conn, first)
    held = claimed(conn, second)
    play_again(conn, first)
    assert refused(conn, first).first is None
    assert id_of(settled(conn, held, RETRY).first) == first.delivery_id


def test_settles_of_several_keys_in_one_group_tell_each_its_next(conn: Connection) -> None:
    pairs = [(born(conn, key), born(conn, key)) for key in ("x", "y")]
    alone, unordered = born(conn, "z"), born(conn, None)
    requests = [verdict(claimed(conn, ref)) for ref in (*(one for one, _ in pairs), alone, unordered)]
    assert [id_of(a.first) for a in settle(conn, requests)] == [*(two.delivery_id for _, two in pairs), None, None]


@pytest.mark.parametrize("ended", [succeeded, died, cancel])
def test_a_refused_claim_of_what_has_ended_tells_who_comes_next(
    conn: Connection, ended: Callable[[Connection, DeliveryRef], None]
) -> None:
    """Whoever ended it may have died before it could tell."""
    first, second = born(conn), born(conn)
    ended(conn, first)
    answer = refused(conn, first)
    assert answer.reason in ("finished", "cancelled")
    assert id_of(answer.first) == second.delivery_id


def test_a_claim_that_ends_what_was_lost_too_often_tells_who_comes_next(conn: Connection) -> None:
    first, second = born(conn), born(conn)
    for _ in range(MAX_LOST):
        run_out(conn, first)
    answer = refused(conn, first)
    assert (answer.reason, id_of(answer.first)) == ("died", second.delivery_id)


def test_what_follows_on_a_cancelled_one_is_asked_for_afterwards(conn: Connection) -> None:
    """The next of the key; the first, where it was not the first that was cancelled; nothing while a worker holds one."""
    one, two, three = born(conn), born(conn), born(conn)
    unordered = born(conn, None)
    cancel(conn, one)
    assert [r.delivery_id for r in ordering.following(conn, [one, unordered])] == [two.delivery_id]
    cancel(conn, three)
    assert [r.delivery_id for r in ordering.following(conn, [three])] == [two.delivery_id]
    claimed(conn, two)
    assert ordering.following(conn, [one, three]) == []


def test_of_an_endpoint_the_first_of_each_key_are_told(conn: Connection) -> None:
    """What waits after all of an endpoint was cancelled came while that went on."""
    refs = {key: [born(conn, key) for _ in range(2)] for key in ("x", "y")}
    born(conn, "x", "b")
    born(conn, None)
    found = ordering.of_endpoint(conn, "a", 10)
    assert {(r.delivery_id, r.line) for r in found} == {(one.delivery_id, "fresh") for one, _ in refs.values()}


# -- two at the same instant -----------------------------------------------------------------------------------------


@pytest.fixture
def several(database: Database) -> Iterator[list[Connection]]:
    """Connections for contenders."""
    with ExitStack() as stack:
        yield [stack.enter_context(database.connect()) for _ in range(4)]


def test_two_claims_of_one_key_that_cannot_see_each_other_do_not_both_get_it(several: list[Connection], conn: Connection) -> None:
    """One claim is under way and not committed; what was replayed in front of it is claimed; only an index knows of both."""
    first, second, other = born(conn), born(conn), born(conn, "other")
    died(conn, first)
    answers: list[Claimed | Refused] = []

    def claim_first() -> None:
        answers.extend(claim(several[1], [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in (first, other)]))

    with several[0].transaction():
        held = claimed(several[0], second)
        play_again(conn, first)
        thread = Thread(target=claim_first)
        thread.start()
        until(lambda: waits_for_a_lock(conn, "tests"))
    thread.join()
    mine, free = answers
    assert mine == Refused("behind")
    assert isinstance(free, Claimed), "what else is in the group is claimed"
    assert id_of(settled(conn, held).first) == first.delivery_id
    assert may_go(conn, first)


def test_a_settle_and_a_routing_at_the_same_instant_do_not_both_overlook_the_next_one(
    several: list[Connection], conn: Connection
) -> None:
    """Each asks after its own commit who is the first: whichever comes later tells of it."""
    for _ in range(60):
        held = claimed(conn, born(conn))
        seq = accept(conn)

        def tell_of_routed(seq: int = seq) -> list[int]:
            return [r.delivery_id for r in ordering.leading(several[0], [route(several[0], seq)])]

        now, told = good(at_once(partial(settled, several[1], held), tell_of_routed))
        [next_one] = [row[0] for row in conn.execute("SELECT id FROM delivery WHERE event_seq = %s", (seq,))]
        assert next_one in {id_of(now.first), *told}
        succeeded(conn, DeliveryRef(next_one, seq, "a"))


def replay_and_claim(conn: Connection, refs: list[DeliveryRef], go: Barrier) -> list[Claimed | Refused]:
    """Replay dead deliveries, then claim them when all are ready."""
    for ref in refs:
        play_again(conn, ref)
    go.wait()
    return claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in refs])


def claim_and_linger(conn: Connection, refs: list[DeliveryRef], go: Barrier) -> list[Claimed | Refused]:
    """Claim deliveries, and commit it only when all are ready."""
    with conn.transaction():
        answers = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in refs])
        go.wait()
    return answers


def test_many_at_once_never_hold_two_of_a_key_and_none_fails(several: list[Connection], conn: Connection) -> None:
    """Groups over the same keys in different orders, some of them replayed just now: collisions are nobody's error."""
    chance = Random(7)
    for n in range(30):
        early, late = [], []
        for key in range(6):
            early.append(born(conn, f"{n} {key}"))
            died(conn, early[-1])
            late.append(born(conn, f"{n} {key}"))
        mine, go = chance.sample(range(6), 3), Barrier(2)
        answers = at_once(
            partial(claim_and_linger, several[0], [late[i] for i in mine], go),
            partial(replay_and_claim, several[1], chance.sample(early, 6), go),
        )
        held = [a.delivery_id for answer in good(answers) for a in answer if isinstance(a, Claimed)]
        keys = [delivery(conn, i)["ordering_key"] for i in held]
        assert len(keys) == len(set(keys))
        assert len(keys) == 6


def test_postgres_itself_holds_one_of_a_key_at_most(conn: Connection) -> None:
    """Whatever a statement forgets to ask."""
    first, second = born(conn), born(conn)
    claimed(conn, first)
    with pytest.raises(psycopg.errors.UniqueViolation, match="delivery_one_per_key"):
        conn.execute(
            "UPDATE delivery SET status = 'delivering', claim_token = gen_random_uuid(), lease_until = now() WHERE id = %s",
            (second.delivery_id,),
        )


# -- what is queued, and what is shown -------------------------------------------------------------------------------


def test_only_the_first_of_a_key_is_to_be_queued(conn: Connection) -> None:
    """Routing, a replay and a reconcile leave the others out."""
    first, second = born(conn), born(conn)
    unordered = born(conn, None)
    refs = [first, second, unordered]
    assert ordering.leading(conn, refs) == [first, unordered]
    page = reconcile.unfinished_deliveries(conn, 0, 10)
    assert [(row.ref.delivery_id, row.is_ordered, row.is_first) for row in page] == [
        (first.delivery_id, True, True),
        (second.delivery_id, True, False),
        (unordered.delivery_id, False, True),
    ]
    assert reconcile.not_first_among(conn, [r.delivery_id for r in refs]) == {second.delivery_id}
    claimed(conn, first)
    assert ordering.leading(conn, refs) == [first, unordered]


def test_what_waits_behind_another_one_is_not_overdue(conn: Connection) -> None:
    """However many there are, they do not hide what is."""
    first = born(conn)
    for _ in range(20):
        born(conn)
    lonely = born(conn, "other")
    conn.execute("UPDATE delivery SET next_attempt_at = now() - interval '1 h', updated_at = now() - interval '1 h'")
    assert {row.ref.delivery_id for row in reconcile.overdue(conn, 4)} == {first.delivery_id, lonely.delivery_id}


def test_the_next_of_a_key_is_found_by_what_ended_lately(conn: Connection) -> None:
    """It has not changed itself since it was born, so nothing else would find it soon."""
    first, second = born(conn), born(conn)
    succeeded(conn, born(conn, "done"))
    succeeded(conn, first)
    found = ordering.after_recent(conn, 300.0, 10, older_than_s=0.0)
    assert [(r.delivery_id, r.line) for r in found] == [(second.delivery_id, "fresh")]
    assert ordering.after_recent(conn, 300.0, 10, older_than_s=60.0) == []


def test_it_is_told_what_a_delivery_waits_for(conn: Connection) -> None:
    """The event of the first of its key and how many come before; or an event that is not routed yet."""
    first = born(conn, event_id="one")
    second, third = born(conn, event_id="two"), born(conn, event_id="three")
    assert ordering.waits(conn, first.seq) == {}
    assert ordering.waits(conn, second.seq) == {second.delivery_id: ordering.Wait("shop", "one", 1)}
    assert ordering.waits(conn, third.seq) == {third.delivery_id: ordering.Wait("shop", "one", 2)}
    accept(conn, event_id="stuck")
    ref = born(conn, "other")
    assert ordering.waits(conn, ref.seq) == {ref.delivery_id: ordering.Wait("shop", "stuck", 0)}


def test_an_erased_event_keeps_no_key(conn: Connection) -> None:
    """It may have been made of what is to be forgotten."""
    ref = born(conn, "ann@example.com", event_id="one")
    succeeded(conn, ref)
    erase.erase(conn, "shop", "one", "ann", "asked to")
    assert delivery(conn, ref.delivery_id)["ordering_key"] is None


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_claims_of_what_has_no_key_write_no_index(conn: Connection) -> None:
    """The columns that order is kept by stay as they are."""
    refs = [born(conn, None) for _ in range(3)]
    with conn.transaction():
        for ref in refs:
            claimed(conn, ref)
        row = conn.execute("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'delivery'").fetchone()
    assert row == (3, 3)


@pytest.mark.direct
@pytest.mark.new_database
def test_no_claim_is_planned_anew(conn: Connection) -> None:
    """What the order might cost must not look so dear that Postgres plans each claim by itself."""
    for key in (None, "k"):
        for _ in range(20):
            succeeded(conn, born(conn, key))
    plans = conn.execute("SELECT custom_plans FROM pg_prepared_statements WHERE statement LIKE '%WITH asked AS%'").fetchall()
    assert plans == [(5,)]
