"""A selection's order under session affinity: the pinned account first, the strategy's order behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from policy_service.application.messages import Affinity, SelectRequest
from policy_service.application.pins import PinAnswer, Pins
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import Instant, Target


@dataclass(frozen=True, slots=True)
class Offered:
    """What a selection has to offer once all filters ran.

    Positions are entries of the pool; an entry that names no connection stands for several accounts.
    """

    order: Sequence[int]
    """Eligible positions in the strategy's order; of a forced connection only those of it."""
    eligible: Sequence[int]
    """Eligible positions, those of other connections than the forced one included."""
    accounts: Callable[[int], Sequence[Target]]
    """Eligible accounts of a position, the strategy's choice first."""
    listed: Iterable[Target]
    """Every target of the pool, eligible or not."""
    excluded: Sequence[Exclusion] = ()

    def choices(self, *, is_forced: bool) -> list[tuple[int, Target]]:
        """(position, account) pairs that a pin may lead to."""
        others = [position for position in self.eligible if position not in self.order] if is_forced else []
        return [(position, target) for position in (*self.order, *others) for target in self.accounts(position)]


@dataclass(frozen=True, slots=True)
class Pinned:
    """The order to try, and what affinity said."""

    order: Sequence[int]
    answer: PinAnswer
    target: Target | None = None
    """Account that serves the first position; None: as the account strategy says."""


class PinnedSelection:
    """Asks the pins on behalf of a selection; use it only where affinity is on (`Pins.is_off`)."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins

    def now(self, request: SelectRequest, offered: Offered, now: Instant) -> Pinned | None:
        """From memory; None where `choose` must be awaited."""
        choices = offered.choices(is_forced=bool(request.forced_connection))
        targets = [target for _, target in choices]
        answer = self._pins.hit(request, targets, now)
        if answer is None:
            question = self._pins.question(request, targets, offered.listed, offered.excluded)
            answer = PinAnswer(Affinity.NONE) if question is None else self._pins.choose_cached(question, now)
        return None if answer is None else _ordered(offered, choices, answer)

    async def choose(self, request: SelectRequest, offered: Offered, now: Instant) -> Pinned:
        """Reading and writing the pin where needed, within the budget of a selection."""
        choices = offered.choices(is_forced=bool(request.forced_connection))
        question = self._pins.question(request, [target for _, target in choices], offered.listed, offered.excluded)
        answer = PinAnswer(Affinity.NONE) if question is None else await self._pins.choose(question, now)
        return _ordered(offered, choices, answer)


def _ordered(offered: Offered, choices: Sequence[tuple[int, Target]], answer: PinAnswer) -> Pinned:
    if answer.position is None:
        return Pinned(offered.order, answer)
    first, target = choices[answer.position]
    return Pinned([first, *(position for position in offered.order if position != first)], answer, target)
