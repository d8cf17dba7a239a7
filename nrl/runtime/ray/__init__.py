"""Meshes of Ray actors.

The way of a call: `processes` asks every actor of a mesh, with what `call_arguments` packs (`pickling`, and `unpadded`
for batches) and `messages` says. There `actor` has set the environment, and `worker` does what is ordered. The way
back: receipts and results, or what the function raised (`exceptions`). `calls` waits for them, with deadlines, and
finds out what happened (`deaths`); `results` are the futures. Nothing is left half done by Ctrl-C (`interrupts`).

The way to a mesh: `connection` joins Ray or starts it, `cluster` reserves slots and starts actors, `nodes` has their
Python built (`nrl.runtime.node`), `sockets` says over which interface they meet, and `logs` shows what they write.
"""
