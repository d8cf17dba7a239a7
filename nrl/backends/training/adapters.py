"""The adapter alone of an engine's params, which is saved, exported and published without its base."""

from typing import NamedTuple

__all__ = ["AdapterParams", "params_of"]


class AdapterParams[P](NamedTuple):
    """The adapter alone of an engine's params, shared with them."""

    params: P


def params_of[P](params: P | AdapterParams[P]) -> P:
    """Return the params themselves, or the params of an adapter.

    >>> params_of(AdapterParams("params")), params_of("params")
    ('params', 'params')
    """
    return params.params if isinstance(params, AdapterParams) else params
