"""What is no test: a server for a Python that has NeMo Gym."""

collect_ignore = ["fixed_blackjack.py"]
