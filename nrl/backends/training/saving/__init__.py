"""Saving: the files that the processes of a trainer write for a checkpoint."""
