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
    """Servers of one model. A request goes to the server with the beginning of its prompt, unless too busy.

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
            failed: servers to avoid, after a failure of these prompts.
        """
        time_now = time.monotonic()
        with self._guard:
            remaining = [index for index in range(len(self.endpoints)) if index not in failed]
            available = {index for index in remaining if self._back[index] <= time_now} or set(remaining)
            load = [count if index in available else math.inf for index, count in enumerate(self._under_way)]
            return self._router.choose(prompts, load)

    async def complete(self, body: Mapping[str, Any], index: int) -> Completion:
        """Send a request to the server that was chosen, and to the others if it fails; see `CompletionEndpoint`.

        Raises:
            ClusterError: all have failed; the error is that of the last.
        """
        failed = list[int]()
        while True:
            self._under_way[index] += 1  # Only the event loop of the requests writes it.
            try:
                completion = await self.endpoints[index].complete(body)
            except (ClusterError, LostRequest):
                failed.append(index)
                self._back[index] = time.monotonic() + _AWAY
                if len(failed) == len(self.endpoints):
                    raise
            else:
                self._back[index] = -math.inf
                with self._guard:
                    self._router.has_read(index, [*body["prompt"], *completion.token_ids.tolist()])
                return completion._replace(times=completion.times + len(failed))
            finally:
                self._under_way[index] -= 1
            (index,) = self.choose([body["prompt"]], failed)
