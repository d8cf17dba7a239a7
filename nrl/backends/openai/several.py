"""One model at several servers: the choice of a server, and failover."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nrl.backends.openai.endpoint import CompletionEndpoint
from nrl.backends.sampling.prefix_router import Router
from nrl.backends.types import Completion
from nrl.errors import ClusterError, LostRequest

__all__ = ["ServerGroup"]

_AWAY = 60.0  # seconds for which a server that has failed is asked only if all have


class ServerGroup:
    """Servers of one model. A request goes to the one that has read the beginning of its prompt, unless it is too busy.

    Args:
        endpoints: the model at each; at least one.
    """

    def __init__(self, endpoints: Sequence[CompletionEndpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self._router, self._guard = Router(len(endpoints)), threading.Lock()
        self._under_way = [0] * len(endpoints)
        self._back = [-math.inf] * len(endpoints)  # when each may be asked again

    def choose(self, prompts: Sequence[Sequence[int]], failed: Sequence[int] = ()) -> list[int]:
        """Choose a server for each of some prompts.

        Args:
            prompts: token ids.
            failed: servers that have failed them already.
        """
        now = time.monotonic()
        with self._guard:
            left = [at for at in range(len(self.endpoints)) if at not in failed]
            there = {at for at in left if self._back[at] <= now} or set(left)
            load = [each if at in there else math.inf for at, each in enumerate(self._under_way)]
            return self._router.choose(prompts, load)

    async def complete(self, body: Mapping[str, Any], at: int) -> Completion:
        """Send a request to the server that was chosen, and to the others if it fails; see `Endpoint.complete`.

        Raises:
            ClusterError: all have failed; the error is that of the last.
        """
        failed = list[int]()
        while True:
            self._under_way[at] += 1  # Only the event loop of the requests writes it.
            try:
                found = await self.endpoints[at].complete(body)
            except (ClusterError, LostRequest):
                failed.append(at)
                self._back[at] = time.monotonic() + _AWAY
                if len(failed) == len(self.endpoints):
                    raise
            else:
                self._back[at] = -math.inf
                with self._guard:
                    self._router.has_read(at, [*body["prompt"], *found.token_ids.tolist()])
                return found._replace(times=found.times + len(failed))
            finally:
                self._under_way[at] -= 1
            (at,) = self.choose([body["prompt"]], failed)
