"""Two processes that meet, or say why they do not."""

import pytest

from nrl.runtime.node.link_benchmark import LinkBenchmark


def test_who_comes_to_one_that_has_failed_says_why_that_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would only know that nobody answered."""
    one, other = (LinkBenchmark("127.0.0.1", lambda address: None) for _ in range(2))
    port = one.open_store("a and b", 60.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        one.measure("a and b", "gloo", "127.0.0.1", port, 0, 4096, 1.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(RuntimeError, match="nowhere0"):
        other.measure("a and b", "gloo", "127.0.0.1", port, 1, 4096, 1.0)
