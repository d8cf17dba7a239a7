"""The layout of tokens on a device: which are computed, how rows are packed, how they get there."""
