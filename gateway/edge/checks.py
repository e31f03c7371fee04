"""The vocabulary of the field table: small checks, each a function from a value to a problem in words, or None.

Owns: what "an integer from 1 to 128" means for a JSON value. Owns no field names.
Promises: pure, never raises on any JSON value; a bool is not an integer; null never reaches a check (it means absent).
Talks to: nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

Check = Callable[[Any], str | None]


def anything(value: Any) -> str | None:
    """Passes: the reader of the endpoint looks at this field itself, or the policy has opened it."""
    return None


def boolean(value: Any) -> str | None:
    """true or false; not "false", not 0."""
    return None if value is True or value is False else "must be true or false"


def never(value: Any) -> str | None:
    """Only false: the field is known and switched off."""
    return None if value is False else "must be false"


def integer(low: int, high: int) -> Check:
    """A whole number in [low, high]."""
    problem = f"must be an integer from {low} to {high}"

    def check(value: Any) -> str | None:
        return None if type(value) is int and low <= value <= high else problem

    return check


def number(low: float, high: float) -> Check:
    """A number in [low, high]."""
    problem = f"must be a number from {low:g} to {high:g}"

    def check(value: Any) -> str | None:
        return None if (type(value) is float or type(value) is int) and low <= value <= high else problem

    return check


def text(limit: int) -> Check:
    """A string of at most `limit` characters."""
    problem = f"must be a string of at most {limit} characters"

    def check(value: Any) -> str | None:
        return None if type(value) is str and len(value) <= limit else problem

    return check


def choice(*allowed: str) -> Check:
    """One of the given strings."""
    problem = "must be one of " + ", ".join(allowed)

    def check(value: Any) -> str | None:
        return None if type(value) is str and value in allowed else problem

    return check


def items(each: Check, limit: int) -> Check:
    """A list of at most `limit` values that all pass `each`."""
    too_many = f"must be a list of at most {limit}"

    def check(value: Any) -> str | None:
        if type(value) is not list or len(value) > limit:
            return too_many
        for item in value:
            problem = each(item)
            if problem is not None:
                return f"must hold values of which each {problem}"
        return None

    return check


def either(*checks: Check) -> Check:
    """Passes when one of the checks does."""

    def check(value: Any) -> str | None:
        problems = [check(value) for check in checks]
        return None if None in problems else " or ".join(str(problem) for problem in problems)

    return check


def table(each: Check, limit: int) -> Check:
    """An object with any names, at most `limit` of them, whose values all pass `each`."""
    problem = f"must be an object of at most {limit} entries"

    def check(value: Any) -> str | None:
        if type(value) is not dict or len(value) > limit:
            return problem
        found = [each(item) for item in value.values()]
        return next((f"must hold values of which each {one}" for one in found if one is not None), None)

    return check


def tree(limit_bytes: int, limit_depth: int, kind: type = dict) -> Check:
    """A JSON value of one kind (dict or list), bounded in serialised bytes and in depth: schemas, tools."""
    name = "an object" if kind is dict else "a list"
    problem = f"must be {name} of at most {limit_bytes} bytes and {limit_depth} levels"

    def check(value: Any) -> str | None:
        fits = type(value) is kind and depth_within(value, limit_depth) and len(orjson.dumps(value)) <= limit_bytes
        return None if fits else problem

    return check


def depth_within(value: Any, limit: int) -> bool:
    """Whether containers nest at most `limit` levels. Walks level by level, so depth costs no stack."""
    level = [value]
    for _ in range(limit + 1):
        level = [child for node in level if isinstance(node, dict | list) for child in _children(node)]
        if not level:
            return True
    return False


def _children(node: dict[str, Any] | list[Any]) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


class Fields:
    """An object whose names are an allow-list of their own. `opened` gives a copy with more names allowed."""

    __slots__ = ("known",)

    def __init__(self, known: Mapping[str, Check]) -> None:
        self.known = dict(known)

    def __call__(self, value: Any) -> str | None:
        if type(value) is not dict:
            return "must be an object"
        found = self.problem(value)
        return None if found is None else f"has a field that is not allowed or not valid: {found[0][:64]} {found[1]}"

    def problem(self, value: dict[str, Any]) -> tuple[str, str] | None:
        """The first (name, problem) of an object; None when all is well. null counts as absent."""
        known = self.known
        for name, item in value.items():
            if item is None:
                continue
            check = known.get(name)
            if check is None:
                return name, NOT_ALLOWED
            problem = check(item)
            if problem is not None:
                return name, problem
        return None

    def opened(self, names: tuple[str, ...]) -> Fields:
        """A copy in which each of `names` (dotted: a name inside an object) is allowed with any value."""
        known = dict(self.known)
        for name in names:
            head, _, rest = name.partition(".")
            inner = known.get(head)
            if not rest:
                known.setdefault(head, anything)
            else:
                known[head] = (inner if isinstance(inner, Fields) else Fields({})).opened((rest,))
        return Fields(known)


NOT_ALLOWED = "is not allowed"
