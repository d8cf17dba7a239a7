"""Gyms: servers of environments, models and other programs that one configuration names."""
