"""What is no test: a program for a Python that has NeMo Gym."""

collect_ignore = ["nemo_gym_process.py"]
