"""Meshes of Ray actors.

The way of a call: `processes` sends every actor of a mesh an order (`messages`) with its arguments, which
`call_arguments` packs (`pickling`, `tensors`, and `unpadded` for batches). There `actor` has set the environment, and
`worker` carries the order out. The way back: receipts and results, or the exception of the function (`exceptions`).
`calls` waits for them, with deadlines, and finds out what happened (`deaths`); `results` are the futures. Ctrl-C leaves
nothing half done (`interrupts`).

The way to a mesh: `connection` joins Ray or starts it, `cluster` reserves slots and starts actors, `nodes` has their
Python built (`nrl.runtime.node`), `sockets` chooses the interface over which they meet, and `logs` shows their output.
"""
