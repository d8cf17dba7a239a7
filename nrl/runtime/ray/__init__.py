"""Meshes of Ray actors.

A call: `processes` sends every actor of a mesh a request (`codec.messages`) with its arguments, which `call_arguments`
packs (`codec`). In the actor's process `actor` has set the environment, and `worker` carries out the request. Replies
and results come back, or the function's exception (`codec.exceptions`). `pending_call` waits for them, with deadlines,
and finds the cause of a failure (`failures`); `results` are the futures. `signal_guard` keeps Ctrl-C from stopping a
call halfway.

A mesh: `connection` joins Ray or starts it, `cluster` reserves slots and starts actors, `nodes` builds their Python
(`nrl.runtime.venvs`), `sockets` chooses their network interface, and `logs` shows their output.
"""
