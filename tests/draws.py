"""How many inputs the property tests draw."""

from hypothesis import settings

__all__ = ["draws"]


def draws(count: int) -> int:
    """Return how many examples a test draws: all with the profile "search", a quarter of them by default."""
    return count if settings.get_current_profile_name() == "search" else count // 4
