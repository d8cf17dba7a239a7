"""Environment variables that switch something on or off."""

import os

from nrl.errors import ConfigError

__all__ = ["flag"]

_ON, _OFF = frozenset({"1", "true", "yes", "on", "y", "t"}), frozenset({"", "0", "false", "no", "off", "n", "f"})


def flag(variable: str) -> bool:
    """Return whether an environment variable switches something on: 1, true, yes or on, in any case.

    Args:
        variable: its name; one that is not set, or empty, or 0, false, no or off, switches nothing on.

    Raises:
        ConfigError: the variable has another value.

    >>> os.environ["NRL_EXAMPLE"] = "No"
    >>> flag("NRL_EXAMPLE")
    False
    >>> del os.environ["NRL_EXAMPLE"]
    """
    value = os.environ.get(variable, "")
    word = value.strip().lower()
    if word in _ON:
        return True
    if word not in _OFF:
        raise ConfigError(f"{variable} is {value!r}; set it to 1 or 0 (or true, false, yes, no, on, off), or unset it")
    return False
