"""Work on a node before nrl is there: building environments, checking interpreters, looking at the machine.

A node's default Python need not have nrl. So these modules travel by value (`nrl.runtime.ray.nodes.by_value`). On a
node they import the standard library alone, and filelock for locks.
"""
