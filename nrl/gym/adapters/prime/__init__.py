"""Environments of the package verifiers, of Prime Intellect: its classes (0.1), and its environment servers (0.4)."""

from nrl.gym.adapters.prime.environments import verifiers
from nrl.gym.adapters.prime.prime_servers import verifiers_server

__all__ = ["verifiers", "verifiers_server"]
