"""What is no test: programs and servers for a Python that has NeMo Gym, or verifiers."""

collect_ignore = ["fixed_blackjack.py", "verifiers_0_1.py", "verifiers_0_4.py"]
