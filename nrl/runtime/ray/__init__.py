"""Meshes of Ray actors: the driver's side, and, in `worker` and `actor`, the side of the processes."""
