"""Text of `x-policy-decision`: why an answer came from where it came. Ids and reasons only, one header line."""

from __future__ import annotations

from policy_service.generated.policy.v1 import policy_pb2, types_pb2

_MAX_CHARS = 1_024


def explain(answer: policy_pb2.SelectTargetResponse) -> str:
    """What holds for the whole decision."""
    parts = [f"decision={answer.decision_id}"]
    if answer.explanation.strategy:
        parts.append(f"strategy={answer.explanation.strategy}")
    if answer.explanation.chosen_by:
        parts.append(f"chosen-by={answer.explanation.chosen_by}")
    parts += [f"out={name_of(each.target)}:{each.reason_text}" for each in answer.exclusions]
    return _line(parts)


def attempt_line(decision: str, target: types_pb2.Target, attempt: int) -> str:
    """The decision with the target that served and the number of its attempt, from 1."""
    return _line([f"target={name_of(target)}", f"attempt={attempt}", decision])


def name_of(target: types_pb2.Target) -> str:
    """provider/connection/model."""
    return "/".join(part for part in (target.provider, target.connection, target.model) if part)


def _line(parts: list[str]) -> str:
    text = "; ".join(parts)[:_MAX_CHARS]
    return "".join(character if " " <= character <= "~" else "?" for character in text)
