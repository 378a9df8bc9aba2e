"""The order of a selection under affinity: bound targets, entries with several accounts, forced connections."""

from __future__ import annotations

from collections.abc import Sequence

from policy_service.application.messages import SelectRequest
from policy_service.application.pin_selection import Offered, Pinned, PinnedSelection
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import Target
from tests.unit.test_pins import Fleet, Member, target

ASKED = SelectRequest("r", session_key="s1", caller_id="u")


def offered(
    entries: Sequence[Sequence[Target]], order: Sequence[int] | None = None, excluded: Sequence[Exclusion] = ()
) -> Offered:
    everywhere = range(len(entries))
    listed = [account for accounts in entries for account in accounts] + [each.target for each in excluded]
    return Offered(everywhere if order is None else order, everywhere, lambda i: entries[i], listed, excluded)


def bound(*names: str) -> list[list[Target]]:
    return [[target(name)] for name in names]


async def choose(member: Member, offer: Offered, request: SelectRequest = ASKED) -> Pinned:
    selection, now = PinnedSelection(member.pins), member.fleet.time.ms
    return selection.now(request, offer, now) or await selection.choose(request, offer, now)


async def test_the_pinned_account_goes_first_and_the_rest_keeps_its_order() -> None:
    one = Fleet().member()
    await choose(one, offered(bound("b")))
    again = await choose(one, offered(bound("a", "b", "c")))
    assert (list(again.order), again.answer.affinity, again.target) == ([1, 0, 2], "hit", target("b"))


async def test_an_entry_that_stands_for_several_accounts_is_served_by_the_pinned_one() -> None:
    one = Fleet().member()
    await choose(one, offered(bound("b")))
    again = await choose(one, offered([[target("a"), target("b")]]))
    assert (list(again.order), again.target) == ([0], target("b"))


async def test_a_detour_leaves_the_strategys_order() -> None:
    one = Fleet().member()
    await choose(one, offered(bound("b")))
    away = await choose(one, offered(bound("a", "c"), (1, 0), [Exclusion(target("b"), "connection_cooldown")]))
    assert (list(away.order), away.answer.affinity, away.target) == ([1, 0], "detour", None)


async def test_a_pin_leads_away_from_a_forced_connection_which_stays_behind_it() -> None:
    one = Fleet().member()
    await choose(one, offered(bound("b")))
    forced = ASKED._replace(forced_connection="a")
    led = await choose(one, offered(bound("a", "b"), (0,)), forced)
    assert (list(led.order), led.answer.affinity) == ([1, 0], "hit")
    unpinned = await choose(one, offered(bound("a", "b"), (0,)), forced._replace(session_key="s2"))
    assert (list(unpinned.order), unpinned.answer.affinity) == ([0], "created")


async def test_nothing_on_offer_is_no_pin() -> None:
    none = await choose(Fleet().member(), offered([]))
    assert (list(none.order), none.answer.affinity) == ([], "none")
