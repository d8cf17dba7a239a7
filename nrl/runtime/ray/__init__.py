"""Meshes of Ray actors. What runs on the driver, and, in `worker` and `actor`, in the processes."""
