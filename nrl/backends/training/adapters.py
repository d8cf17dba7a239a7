"""The adapter alone of what an engine trains, which is saved, exported and published without the weights it is on."""

from typing import NamedTuple

__all__ = ["Adapter", "params_of"]


class Adapter[P](NamedTuple):
    """The adapter alone of an engine's params, shared with them."""

    params: P


def params_of[P](params: P | Adapter[P]) -> P:
    """The params themselves, or those that an adapter is of.

    >>> params_of(Adapter("params")), params_of("params")
    ('params', 'params')
    """
    return params.params if isinstance(params, Adapter) else params
