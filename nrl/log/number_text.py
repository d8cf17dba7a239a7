"""Numbers as a person reads them: one rule for the terminal, tables and reports. Files keep full precision."""

import math
import re

__all__ = ["NOISE", "format_number", "format_seconds", "noise_limit"]

NOISE = 1e-6
"""Rounding errors of float32 are smaller than this, both beside 1 and relative to a number."""

_SMALL_BY_NATURE = re.compile(r"(^|[/_.])(lr|learning_rate|weight_decay|eps|epsilon)([/_.]|$)")
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def noise_limit(name: str) -> float:
    """Return the size below which values of a metric are noise: 1e-6, or 0 for learning rates and the like.

    >>> noise_limit("mismatch/kl"), noise_limit("critic/lr")
    (1e-06, 0.0)
    """
    return 0.0 if _SMALL_BY_NATURE.search(name) else NOISE


def format_number(value: float, name: str = "", digits: int = 4) -> str:
    """Format a number for people: few digits, thousands separated, millions with a unit, noise as 0.

    Args:
        value: any number.
        name: of the metric; a learning rate below 1e-6 is not noise.
        digits: significant ones. Whole thousands are not rounded.

    Returns:
        Text in ASCII.

    >>> [format_number(value) for value in (0.29999, 1.2345678e-07, 41142.86, 4096, 1234567, -0.0000123)]
    ['0.3', '0', '41,143', '4,096', '1.235M', '-1.23e-5']
    >>> format_number(3e-7, "lr")
    '3e-7'
    """
    if not math.isfinite(value):
        return str(float(value))  # nan, inf or -inf
    if value == 0 or abs(value) < noise_limit(name):
        return "0"
    rounded = abs(float(f"{value:.{digits}g}"))
    if 1e3 <= rounded < 1e6:
        return f"{value:,.0f}"
    for scale, unit in _UNITS:
        if scale <= rounded < 1e15:
            return f"{value / scale:.{digits}g}{unit}"
    mantissa, e, exponent = f"{value:.{digits}g}".partition("e")
    return mantissa + (f"e{int(exponent)}" if e else "")


def format_seconds(seconds: float) -> str:
    """Format a short time, always in seconds.

    >>> format_seconds(0.123456), format_seconds(12.5), format_seconds(1234.5)
    ('0.123 s', '12.5 s', '1,234 s')
    """
    return f"{format_number(seconds, digits=3)} s"
