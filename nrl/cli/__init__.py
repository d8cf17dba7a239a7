"""The ``nrl`` command, an application of everything below it."""
