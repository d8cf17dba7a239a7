"""Meshes: slots, the processes on them, functions mapped over them, and the local cluster."""
