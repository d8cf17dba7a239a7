"""What a served environment is given where nothing else is said: the same by `nrl.serve` and in a configuration."""

__all__ = ["LARGEST", "LEASE", "MOST"]

LEASE = 60.0
"""Seconds for which an episode is kept that nobody asks for."""
MOST = 20_000
"""Calls under way, and open episodes."""
LARGEST = 2**26
"""Bytes of a request."""
