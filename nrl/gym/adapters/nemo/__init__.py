"""Environments of NeMo Gym, as a client of its servers and as one of them."""
