"""What is no test: programs for a Python that has NeMo Gym, or verifiers."""

collect_ignore = ["nemo_gym_process.py", "verifiers_0_1.py", "verifiers_0_4.py"]
