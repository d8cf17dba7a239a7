"""What a server tells Prometheus: requests and their seconds, open episodes, calls."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from nrl.gym.http.service import Service

__all__ = ["Numbers"]

_BOUNDS = (
    *(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0),
)
"""Seconds of a request."""
_NAMES = (*map(floatToGoString, _BOUNDS), "+Inf")


class Numbers:
    """Numbers of a service, counted in one thread; a collector of Prometheus, which reads them when it is asked."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._requests: dict[tuple[str, int], int] = {}
        self._buckets: dict[str, list[int]] = {}  # of each path, how many lie in each
        self._sums: dict[str, float] = {}

    def note(self, path: str, status: int, seconds: float) -> None:
        """A request is over."""
        key = path, status
        self._requests[key] = self._requests.get(key, 0) + 1
        if path not in self._sums:
            self._buckets[path], self._sums[path] = [0] * len(_NAMES), 0.0
        self._buckets[path][bisect_left(_BOUNDS, seconds)] += 1
        self._sums[path] += seconds

    def collect(self) -> Iterator[Metric]:
        """All numbers."""
        requests = CounterMetricFamily("nrl_gym_requests", "Requests.", labels=["path", "status"])
        for (path, status), count in self._requests.items():
            requests.add_metric([path, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily("nrl_gym_seconds", "Seconds of a request.", labels=["path"])
        for path, counts in self._buckets.items():
            seconds.add_metric([path], list(zip(_NAMES, accumulate(counts), strict=True)), self._sums[path])
        yield seconds
        service = self._service
        yield GaugeMetricFamily("nrl_gym_sessions", "Open episodes.", service.sessions)
        yield GaugeMetricFamily("nrl_gym_under_way", "Calls of the environment.", service.under_way)
        yield CounterMetricFamily("nrl_gym_evicted", "Episodes that nobody asked for any more.", service.evicted)
        yield CounterMetricFamily("nrl_gym_replayed", "Calls that were answered from memory.", service.replayed)

    def shown(self) -> bytes:
        """All numbers, as text."""
        return generate_latest(self)
