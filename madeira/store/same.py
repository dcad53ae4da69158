"""Whether two posts under one id say the same: equal bytes, or equal JSON values with exact numbers.

A retry of the upstream may order its keys differently or space them otherwise; that is no conflict. But ``1`` and
``true`` differ, and so do two 20-digit integers that a float cannot tell apart.
"""

import json
from decimal import Decimal
from typing import Any


def same_value(a: str | None, b: str | None) -> bool:
    """Whether two JSON texts (None: absent) mean the same value; texts that cannot be parsed are the same only if equal."""
    if a is None or b is None or a == b:
        return a == b
    try:
        return _equal(_parse(a), _parse(b))
    except (ValueError, ArithmeticError, RecursionError):
        return False


def _parse(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
