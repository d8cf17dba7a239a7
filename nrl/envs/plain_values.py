"""Numbers and arrays among the values that user code returns, and values as errors show them."""

import math
import numbers
import operator
import reprlib
from decimal import Decimal
from fractions import Fraction
from typing import Any

from nrl.arguments import with_article

__all__ = ["BYTES", "is_array", "named_kind", "plain_text", "real_number", "scalar_value", "shown_value"]

BYTES = (bytes, bytearray, memoryview)

_repr = reprlib.Repr(maxstring=120, maxother=120, maxlong=60, maxlevel=3, maxdict=6, maxlist=6, maxtuple=6)


def scalar_value(value: Any) -> Any:
    """The number of a scalar array or tensor; any other value as it is."""
    if hasattr(value, "tolist") and not isinstance(value, type | memoryview) and getattr(value, "ndim", 1) == 0:
        return value.tolist()
    return value


def real_number(value: Any) -> float | None:
    """A real number as a float, infinite where that cannot hold it; None for any other value."""
    value = scalar_value(value)
    if not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, operator.gt(value, 0) - 0.5)
    except (TypeError, ValueError):  # a signalling NaN of Decimal
        return math.nan


def plain_text(value: object) -> str:
    """Return a value as Python writes it, however many digits an integer has."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(Decimal(value))
    if isinstance(value, Fraction):
        return "/".join(map(plain_text, value.as_integer_ratio() if value.denominator != 1 else [value.numerator]))
    return str(value)


def named_kind(value: Any) -> str:
    """The type of a value, and its length if it is a tuple or a list."""
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return "nothing" if value is None else f"{with_article(type(value).__name__)}{size}"


def shown_value(value: Any) -> str:
    """A value for a message, bounded in length; one whose ``repr`` fails is shown by its type."""
    try:
        return _repr.repr(value)
    except Exception:
        return with_article(type(value).__name__)


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor with at least one dimension."""
    return hasattr(value, "tolist") and not isinstance(value, type) and getattr(value, "ndim", 1) > 0
