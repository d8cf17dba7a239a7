"""The tasks of reasoning-gym, with the scorers that are mended."""
