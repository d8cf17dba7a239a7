"""Sandboxes for programs that models write: what one is, and one that bubblewrap makes.

>>> run = bubblewrap()
>>> run(["python", "-c", "print(6 * 7)"], b"", {}, Limits()).stdout
b'42\\n'
"""

from nrl.envs.sandbox.base import Channel, Dialogue, Finished, Limits, Sandbox
from nrl.envs.sandbox.namespaces import bubblewrap

__all__ = ["Channel", "Dialogue", "Finished", "Limits", "Sandbox", "bubblewrap"]
