"""What every test runs under: no network, one thread, the same examples each time."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, which reads it once

import hypothesis
import torch

import nrl  # noqa: F401 - before pytest collects doctests, or it would import modules a second time under their names

torch.set_num_threads(1)  # small tensors: more threads cost more than they give, and sums keep one order

hypothesis.settings.register_profile("nrl", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("nrl")
