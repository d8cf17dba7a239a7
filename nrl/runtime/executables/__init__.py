"""Executables: the Python environments of meshes, from a lock file to a virtual environment on a node."""
