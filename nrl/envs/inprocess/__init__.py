"""Calls of user code, which may raise anything, and may never return."""
