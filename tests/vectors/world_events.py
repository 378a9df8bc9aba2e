"""Steps of the vectors of a `World`: each event by name, with the result that its own `expect` may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policy_service.application import connection_acts
from policy_service.application.admission_plan import Admission
from policy_service.application.report_plan import FoldResult
from tests.vectors import world_locks
from tests.vectors.rows import expand
from tests.vectors.step_fields import WORLD, WORLD_GIVEN, check_fields, check_given
from tests.vectors.world import World, verdict_text
from tests.vectors.world_checks import Moment, check, cooling_ms

Step = Mapping[str, Any]
Result = dict[str, Any]


class Player:
    """Plays the steps of one vector and checks them.

    Args:
        default_connection: connection of `failure` and `success` steps that name none.
    """

    def __init__(self, given: Mapping[str, Any], default_connection: str = "", **defaults: Any) -> None:
        self.world = World(given)
        self.default_connection = default_connection
        self.defaults = defaults
        self.now = 0
        self.model = ""
        self._fresh = 0
        self._last: Result = {}

    def play(self, vector: Mapping[str, Any]) -> None:
        """All steps, then the final expectations."""
        check_given(vector.get("given", {}), WORLD_GIVEN)
        for step in vector["steps"]:
            self.step(step)
        kept: Result = {name: self._last[name] for name in ("record", "answer") if name in self._last}
        check(Moment(self.world, self.now, kept, self.model), vector.get("expect", {}))

    def step(self, step: Step) -> None:
        """One step and its own expectations."""
        self.now = int(step.get("at_ms", self.now))
        self.model = step.get("model", self.model)
        check_fields(step, WORLD)
        result = EVENTS[step["event"]](self, step)
        if "record" in result:
            self._last = result
        moment = Moment(
            self.world,
            self.now,
            result,
            self.model,
            step.get("connection", "c1"),
            step.get("replica", "r1"),
        )
        check(moment, step.get("expect", {}))

    def fresh_connection(self) -> str:
        """A connection that no step has used."""
        self._fresh += 1
        return f"fresh-{self._fresh}"


# --- selections -------------------------------------------------------------------------------------------------
def _shown(admission: Admission) -> Result:
    return {
        "granted": admission.granted,
        "probe": bool(admission.probes),
        "reason": None if admission.reason is None else str(admission.reason),
        "retry_after_ms": admission.retry_after_ms,
    }


def _admit(player: Player, step: Step) -> Result:
    result = _shown(player.world.admit(step, step.get("as", "unnamed"), player.now))
    # A granted admission refuses nothing: what an expectation says about waiting is about the state then.
    return {name: value for name, value in result.items() if not (result["granted"] and name == "retry_after_ms")}


def _acquires(player: Player, step: Step) -> Result:
    count = int(step["count"])
    names = expand(step["as"]) if "as" in step else [f"many-{player.now}-{n}" for n in range(count)]
    replicas = step.get("replicas", [step.get("replica", "r1")])
    taken = [
        player.world.admit(step, name, player.now, replicas[n % len(replicas)]) for n, name in enumerate(names[:count])
    ]
    return {"granted_count": sum(admission.granted for admission in taken)}


def _start(player: Player, step: Step) -> Result:
    for name in expand(step["as"]):
        assert player.world.admit(step, name, player.now).granted
    return {}


def _early_probe(player: Player, step: Step) -> Result:
    return {"granted": player.world.early_probe(step, step.get("as", "unnamed"), player.now)}


def _deny(player: Player, step: Step) -> Result:
    for name in expand(step["of"]):
        player.world.deny(name)
    return {"verdict": "inconclusive"}


# --- outcomes ---------------------------------------------------------------------------------------------------
def _folded(results: list[FoldResult]) -> Result:
    last = results[-1]
    shown: Result = {"counted": any(result.counted for result in results), "verdict": verdict_text(last)}
    return shown if last.record is None else {**shown, "record": last.record, "answer": last.connection}


def _outcome(player: Player, step: Step) -> Result:
    world, again = player.world, int(step.get("report_again", 0))
    results = []
    for name in expand(step["of"]) if "of" in step else [""]:
        reported = world.report(step, player.now, name)
        results.append(reported)
        for _ in range(again):
            repeated = _repeated(player, step, name)
            assert not repeated.counted
    return _folded(results)


def _repeated(player: Player, step: Step, name: str) -> FoldResult:
    """The same report once more, under the same id."""
    newest = list(player.world.answers)[-1]
    return player.world.report(step if name else {**step, "event_id": newest}, player.now, name)


def _many(player: Player, step: Step, count: int, status: int | None) -> Result:
    reported = {**step, "status": step.get("status", status)}
    results = [player.world.report(reported, player.now, connection=player.fresh_connection()) for _ in range(count)]
    return _folded(results)


def _failures(player: Player, step: Step) -> Result:
    return _many(player, step, int(step["count"]), 503)


def _threads(player: Player, step: Step) -> Result:
    return _many(player, step, int(step["count"]) * int(step["each"]), 503)


def _successes(player: Player, step: Step) -> Result:
    return _many(player, step, int(step["count"]), 200)


def _single(status: int) -> Callable[[Player, Step], Result]:
    def play(player: Player, step: Step) -> Result:
        own = {"connection": player.default_connection, "status": status, **player.defaults, **step}
        if "operator_rules" in step:
            player.world.set_rules(step["operator_rules"])
        times = int(step.get("count", step.get("concurrent", 1)))
        return _folded([player.world.report(own, player.now) for _ in range(times)])

    return play


# --- acts and reads ---------------------------------------------------------------------------------------------
def _control(player: Player, step: Step) -> Result:
    player.world.control(step["event"], player.now, step.get("replica", "r1"))
    return {}


def _configure(player: Player, step: Step) -> Result:
    player.world.configure(step.get("config", {}), step.get("settings", {}))
    return {}


def _restart(player: Player, step: Step) -> Result:
    player.world.restart()
    return {}


def _repeat(player: Player, step: Step) -> Result:
    for _ in range(int(step["times"])):
        for inner in step["steps"]:
            player.step({"at_ms": player.now, **inner})
    return {}


def _read(player: Player, step: Step) -> Result:
    world, now = player.world, player.now
    if "scope" in step:
        connection = step.get("connection", "") if step["scope"] == "connection" else ""
        remaining = cooling_ms(Moment(world, now), connection)
        return {"cooling": remaining > 0, "remaining_ms": remaining}
    if "model" in step:
        lock = world.lock(step["model"], now, step.get("connection", "c1"))
        until = None if lock is None else lock.until
        return {"locked": lock is not None, "remaining_ms": 0 if until is None else until - now}
    return {}


def _credential_change(player: Player, step: Step) -> Result:
    player.world.change_credential(step.get("connection", "c1"), player.now)
    return {}


def _delete(player: Player, step: Step) -> Result:
    player.world.delete_lock(step["model"], player.now)
    return {}


def _recover(player: Player, step: Step) -> Result:
    return {"applied": player.world.recover(step, player.now)}


def _record(player: Player, step: Step) -> Result:
    world_locks.record(player.world, step, player.now)
    return {}


def _decay(player: Player, step: Step) -> Result:
    return world_locks.decay(player.world, step, player.now)._asdict()


def _list(player: Player, step: Step) -> Result:
    return {"models": world_locks.listed(player.world, player.now)}


def _act(act: Callable[..., object]) -> Callable[[Player, Step], Result]:
    def play(player: Player, step: Step) -> Result:
        world, connection = player.world, step.get("connection", "c1")
        book, facts = world.book(), world.log(player.now, step["event"], step.get("replica", "r1"))
        act(book, world.provider, connection, player.now, facts)
        world.commit(book, facts)
        return {}

    return play


def _retry_due(player: Player, step: Step) -> Result:
    world, connection = player.world, step.get("connection", "c1")
    book, facts = world.book(), world.log(player.now, "retry", step.get("replica", "r1"))
    permit = connection_acts.grant_retry(book, world.provider, connection, f"p{player.now}", player.now, facts)
    world.commit(book, facts)
    return {"due": permit is not None}


def _retry_result(player: Player, step: Step) -> Result:
    world, connection = player.world, step.get("connection", "c1")
    book, facts = world.book(), world.log(player.now, "retry", step.get("replica", "r1"))
    connection_acts.retry_result(book, world.provider, connection, step["ok"], player.now, facts)
    world.commit(book, facts)
    return {}


def _facts(player: Player, step: Step) -> Result:
    return {}


EVENTS: Mapping[str, Callable[[Player, Step], Result]] = {
    "admit": _admit,
    "acquires": _acquires,
    "admit_many": _acquires,
    "start": _start,
    "early_probe": _early_probe,
    "deny": _deny,
    "outcome": _outcome,
    "failures": _failures,
    "successes": _successes,
    "threads": _threads,
    "failure": _single(503),
    "success": _single(200),
    "reset": _control,
    "force_open": _control,
    "disable": _control,
    "clear_override": _control,
    "configure": _configure,
    "restart": _restart,
    "repeat": _repeat,
    "read": _read,
    "credential_change": _credential_change,
    "delete": _delete,
    "recover": _recover,
    "record": _record,
    "decay": _decay,
    "list": _list,
    "operator_reset": _act(connection_acts.reset_connection),
    "retry_due": _retry_due,
    "retry_result": _retry_result,
    "facts": _facts,
}
