"""Answers of mathematics: integers and fractions here, everything else in a process that can be killed."""
