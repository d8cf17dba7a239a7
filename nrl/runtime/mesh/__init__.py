"""Meshes: slots and the processes on them, functions mapped over them, and the cluster that is this process."""
