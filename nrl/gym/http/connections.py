"""Connections over HTTP and WebSockets to servers of others, on the loop of `nrl.runtime.threads.run_in_loop`."""

import atexit
import functools

import aiohttp

from nrl.runtime.threads import run_in_loop

__all__ = ["connections"]


@functools.cache
def connections() -> aiohttp.ClientSession:
    """All connections of this process, which keep no cookies: each episode has its own. Called on that loop alone."""
    made = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=0))
    atexit.register(lambda: run_in_loop(made.close()).result(5))
    return made
