"""Tracing: the timeline of all calls, and profiles of single steps."""
