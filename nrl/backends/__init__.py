"""Backends: engines that train and samplers that generate. Importing this package is cheap."""

from nrl.backends.base import Completion, Engine, Model, Params, Sampler, Sampling, Trainer, TrainState
from nrl.backends.held_out import evaluate
from nrl.backends.models import load_tokenizer
from nrl.backends.optimizers import Optimizer, Schedule, adamw, learning_rate
from nrl.backends.publishing import publish

__all__ = [
    "Completion",
    "Engine",
    "Model",
    "Optimizer",
    "Params",
    "Sampler",
    "Sampling",
    "Schedule",
    "TrainState",
    "Trainer",
    "adamw",
    "evaluate",
    "learning_rate",
    "load_tokenizer",
    "publish",
]
