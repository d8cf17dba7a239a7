"""Code that runs on a node without nrl: facts of the machine, benchmarks, the reaper.

A node's default Python need not have nrl. So these modules travel by value (`nrl.runtime.ray.nodes.send_by_value`). On
a node they import the standard library alone.
"""
