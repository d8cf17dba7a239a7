"""The routers of a mixture of experts: where they are in a transformers model, and how to choose in their place.

A router gives each token k of its layer's experts, the routes of the token, and how much each of them counts. Its class
is the one whose logits transformers records (`router_logits`). Such routers choose by one ``topk`` over all experts, so
a mode that answers this call chooses in the place of any of them. What a router makes of the choice stays its own: the
weights of the experts are those of its live probabilities, and gradients reach them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from nrl.errors import ModelError

__all__ = ["Routers", "layer_numbers", "replay_routes", "routers", "sizes"]

_TOPK: Any = {torch.topk, Tensor.topk}
_FOUND: WeakKeyDictionary[nn.Module, "Routers"] = WeakKeyDictionary()


class Routers(NamedTuple):
    """The number of a model's routers, and how many experts each of them chooses.

    Args:
        layers: the number of layers with a router.
        k: the experts of a token in each of these.
        experts: the number of experts to choose from.

    >>> Routers(layers=2, k=2, experts=8).k
    2
    """

    layers: int
    k: int
    experts: int


def routers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a transformers model by name, in the order of its layers; none, if it has no experts.

    Args:
        module: with an adapter or without; it may be sharded.

    >>> from nrl import tiny
    >>> from nrl.backends.models.loading import skeleton
    >>> experts = tiny.model(
    ...     model_type="qwen3_moe", num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ... )
    >>> list(routers(skeleton(experts)))
    ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    >>> list(routers(skeleton(tiny.model())))
    []
    """
    recorded: list[Any] = []
    for part in module.modules():
        classes = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorded += classes if isinstance(classes, list | tuple) else [classes]
    return {
        name: part for name, part in module.named_modules() if any(_is_recorded(part, name, item) for item in recorded)
    }


def _is_recorded(module: nn.Module, name: str, recorded: Any) -> bool:
    """Return whether transformers records this module: a class, or a class and a part of a name."""
    kind = getattr(recorded, "target_class", recorded)
    within = getattr(recorded, "layer_name", None)
    return isinstance(kind, type) and isinstance(module, kind) and (within is None or within in name)


def layer_numbers(module: nn.Module) -> list[int]:
    """Return the numbers of the layers that have a router, from 0.

    Raises:
        ModelError: a router lies in no numbered layer, or two lie in the same one.
    """
    matches = [re.findall(r"(?:^|\.)(\d+)\.", name) for name in routers(module)]
    numbers = [int(match[0]) if match else -1 for match in matches]
    if -1 in numbers or any(a >= b for a, b in pairwise(numbers)):
        raise ModelError(
            f"{type(module).__name__}: its routers are {', '.join(routers(module))}, and not one to a numbered layer, "
            "so it is not known which layer an engine's routes are of; use hf.sampler(..., routes=True)"
        )
    return numbers


def sizes(module: nn.Module) -> Routers:
    """Return how many experts the routers of a model choose; try each class once, on small inputs and other weights.

    Args:
        module: as for `routers`; its weights may be anywhere, or take no memory.

    Raises:
        ModelError: the model has no routers, they differ, or their choice cannot be replayed.

    >>> from nrl import tiny
    >>> from nrl.backends.models.loading import skeleton
    >>> experts = tiny.model(
    ...     model_type="qwen3_moe", num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ... )
    >>> sizes(skeleton(experts))
    Routers(layers=2, k=2, experts=4)
    """
    if module not in _FOUND:
        by_name = routers(module)
        if not by_name:
            raise ModelError(
                f"{type(module).__name__}: it has no routers that transformers records, so it has no routes; for a "
                "model without experts leave routes= out, and the column with batch.exclude('routes')"
            )
        choices = {name: _try_router(router) for name, router in by_name.items()}
        if len(set(choices.values())) > 1:
            described = ", ".join(f"{name} chooses {k} of {experts}" for name, (k, experts) in choices.items())
            raise ModelError(
                f"{type(module).__name__}: {described}; routes are kept for routers that choose as many of as many, so "
                "leave routes= out"
            )
        ((k, experts),) = set(choices.values())
        _FOUND[module] = Routers(len(by_name), k, experts)
    return _FOUND[module]


def _try_router(router: nn.Module) -> tuple[int, int]:
    """Return how many experts a router chooses, and of how many; check that its choice can be overridden."""
    states = [*router.named_parameters(), *router.named_buffers()]
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(x.shape, generator=generator) for name, x in states}
    matrix = next((x for x in values.values() if x.ndim == 2), None)
    if matrix is None:
        raise _make_error(router, "it has no matrix of weights")
    experts, width = matrix.shape
    hidden = torch.randn(4, width, generator=generator)

    def run(mode: _Choosing) -> Any:
        try:
            with torch.no_grad(), mode:
                return functional_call(router, values, (hidden,))
        except Exception as error:  # A router that wants more than hidden states may raise any error.
            raise _make_error(router, f"it cannot be called with hidden states alone ({error})") from error

    live = _Choosing(experts, None)
    live_output = run(live)
    if len(live.chosen) != 1:
        raise _make_error(
            router, f"it calls topk over all of its {experts} experts {len(live.chosen)} times, and not once"
        )
    ((k, chosen),) = live.chosen
    if not (
        isinstance(live_output, tuple)
        and len(live_output) == 3
        and isinstance(live_output[2], Tensor)
        and torch.equal(live_output[2], chosen)
    ):
        raise _make_error(router, "it does not return logits, weights and the experts that it chose")
    other = (chosen + 1) % experts
    again, turned = (run(_Choosing(experts, routes)) for routes in (chosen, other))
    same = all(torch.equal(a, b) for a, b in zip(again, live_output, strict=True))
    if not (same and torch.equal(turned[2], other) and torch.equal(turned[0], live_output[0])):
        raise _make_error(router, "it does not take experts that are given for those that it chose")
    return k, experts


def _make_error(router: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"{type(router).__name__}: routes cannot be recorded or replayed with this router, because {reason}; leave "
        "routes= out, and the column with batch.exclude('routes'): then trainer and sampler choose by themselves"
    )


class _Choosing(TorchFunctionMode):
    """A mode that notes the choice of a router, by its ``topk`` over all experts, or chooses in its place.

    Args:
        experts: of the router.
        routes: ``[n, k]`` int64, to be chosen; None: the router chooses.
    """

    def __init__(self, experts: int, routes: Tensor | None) -> None:
        super().__init__()
        self._experts, self._routes = experts, routes
        self.chosen: list[tuple[int, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer the one call, and pass all others on."""
        kwargs = kwargs or {}
        call = _read_topk_call(*args, **kwargs) if func in _TOPK else None
        if call is None or call[0].ndim != 2 or call[0].shape[1] != self._experts:
            return func(*args, **kwargs)
        scores, k = call
        if self._routes is None:
            answer = func(*args, **kwargs)
        else:
            answer = torch.return_types.topk((scores.gather(1, self._routes), self._routes))
        self.chosen.append((k, answer[1]))
        return answer


def _read_topk_call(
    input: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Tensor, int] | None:
    """Return the scores and the k of a call of ``topk`` that chooses experts; None: it chooses something else."""
    return (input, k) if largest and dim in (-1, input.ndim - 1) else None


class _Replay:
    """Replacements of the forwards of a model's routers, made once, so that ``torch.compile`` recognizes them."""

    def __init__(self, module: nn.Module) -> None:
        self.kind, self.experts, by_name = type(module).__name__, sizes(module).experts, routers(module)
        self.routes: Tensor | None = None
        self.ran = dict.fromkeys(by_name, 0)
        self._stand_ins = [
            (router, torch.compiler.disable(partial(self._forward, name, router.forward, layer)))
            for layer, (name, router) in enumerate(by_name.items())
        ]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Stand in their place while the block runs."""
        before = [router.__dict__.get("forward") for router, _ in self._stand_ins]
        for router, forward in self._stand_ins:
            router.forward = forward
        try:
            yield
        finally:
            for (router, _), original in zip(self._stand_ins, before, strict=True):
                del router.forward
                if original is not None:
                    router.forward = original

    def _forward(self, name: str, forward: Callable[..., Any], layer: int, hidden: Tensor) -> Any:
        assert self.routes is not None
        self.ran[name] += 1
        tokens = hidden.numel() // hidden.shape[-1]
        if tokens != len(self.routes):
            raise ModelError(
                f"{self.kind}: '{name}' routes {tokens} tokens, and there are routes of {len(self.routes)}; a model "
                "that leaves tokens out cannot be replayed, so leave the column out: batch.exclude('routes')"
            )
        with _Choosing(self.experts, self.routes[:, layer].to(hidden.device, torch.int64)):
            return forward(hidden)


_REPLAYS: WeakKeyDictionary[nn.Module, _Replay] = WeakKeyDictionary()


@contextmanager
def replay_routes(module: nn.Module, routes: Tensor | None, *, again: bool = False) -> Iterator[None]:
    """Let the routers of a model choose these experts while the block runs.

    Where layers are computed again for the backward pass (activation checkpointing), that has to happen in such a
    block, too.

    Args:
        module: see `routers`.
        routes: ``[n, layers, k]`` integers, for the n tokens of the forward, in its order; None: the routers choose.
        again: the block is a backward pass, in which any of the routers may run again.

    Raises:
        ModelError: a router got other tokens than the routes are of; or, at the end, one has not run once.
    """
    if routes is None:
        yield
        return
    if module not in _REPLAYS:
        _REPLAYS[module] = _Replay(module)
    replay = _REPLAYS[module]
    replay.routes, replay.ran = routes, dict.fromkeys(replay.ran, 0)
    with replay.on():
        yield
    replay.routes = None
    wrong = [f"'{name}' ran {times} times" for name, times in replay.ran.items() if times != 1]
    if wrong and not again:
        raise ModelError(
            f"{replay.kind}: {wrong[0]} in a forward, and not once, so it is not known what its routes are of; leave "
            "the column out: batch.exclude('routes')"
        )
