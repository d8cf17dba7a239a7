"""A vLLM engine in one process, stepped by the process itself.

vLLM's asynchronous front end runs its engine in another process, which imports vLLM again, sends every token over a
socket, and can get weights only through a copy. Here a process of a mesh *is* the engine's process: it reads weights
where the object store maps them, and whoever kills the process kills the engine (docs/decisions/0017).
"""

import gc
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nrl.backends.engine import Decoded, Request
from nrl.backends.models.loading import build, end_tokens, files, load_tokenizer, save_model
from nrl.backends.models.named_weights import check_arrived, check_weight
from nrl.backends.models.shards import ShardAssembler
from nrl.backends.types import Bucket, Model
from nrl.backends.vllm import settings, tensor_parallel, vllm_adapter, weight_loading
from nrl.backends.vllm.routed_experts import RoutedExperts
from nrl.errors import ArgumentError, ConfigError, GenerationError, ModelError
from nrl.runtime.transfer import has_checksum

__all__ = ["VllmEngine"]

_SOON, _LATEST = 0.02, 0.03  # seconds of decoding until it returns with finished requests, or without any
_ON_A_GPU = 3  # times as long: a step takes some 10 ms whatever it decodes, and a look for requests between two is idle
_COLDEST = 0.01  # vLLM's own bound
_MORE = "; give a smaller max_model_len, or more memory with kv_cache_memory_bytes or gpu_memory_utilization"
_NO_ROOM = "KV cache is needed", "No available memory for the cache"  # how vLLM says so


_ALIVE: "weakref.WeakSet[VllmEngine]" = weakref.WeakSet()


class VllmEngine:
    """A `nrl.backends.engine.SampleEngine`; see `nrl.backends.vllm.sampler` for the arguments."""

    def __init__(self, model: Model, options: Mapping[str, Any], routed: RoutedExperts | None = None) -> None:
        if _ALIVE:
            raise ModelError(
                "vllm.sampler: this process has a vLLM engine already, and vLLM keeps what belongs to one in the whole "
                "process; make the second sampler on slots of its own, or of the same slots, which gives it processes"
            )
        settings.prepare()
        self._model, self._options, self._routed = model, settings.with_routes(options, routed is not None), routed
        self._waiting: dict[str, tuple[int, ...]] | None = None  # while it receives weights, those still to come
        self._fingerprints: dict[str, tuple[torch.Size, int]] = {}  # fingerprints of a sample of the weights that came
        self._joining = ShardAssembler()
        self._requests: dict[int, Request] = {}  # unfinished requests
        self._start()
        _ALIVE.add(self)

    def _start(self) -> None:
        tokenizer = load_tokenizer(self._model)
        with tempfile.TemporaryDirectory() as scratch:
            folder, self._stops = _prepare_folder(self._model, tokenizer, Path(scratch))
            texts = Path(scratch) / "tokenizer"
            tokenizer.save_pretrained(texts)
            shutil.copy(folder / "config.json", texts)  # vLLM looks for it there, too
            self._adapter = None if self._model.lora is None else vllm_adapter.VllmAdapter(self._model)
            adapter_arguments = {} if self._adapter is None else self._adapter.arguments
            self._engine = _start_engine(folder, texts, self._model, dict(self._options) | adapter_arguments)
            self._engine.set_weight_version("0")
            config = self._engine.model_config
            self._shapes = _shapes(folder, bool(getattr(config.hf_config, "tie_word_embeddings", False)))
        if self._adapter is not None:
            self._shapes = self._adapter.shapes
            self._adapter.begin(self._engine)
        self.context_length = min(int(config.max_model_len), int(tokenizer.model_max_length))
        self.vocabulary = int(config.get_vocab_size())
        self._times = _ON_A_GPU if torch.cuda.is_available() else 1
        self.matrices: torch.dtype | None = None
        if self._adapter is None:
            alike: list[bool] = self._engine.apply_model(partial(weight_loading.has_uniform_dtype, config.dtype))
            self.matrices = config.dtype if all(alike) else None

    def advance(
        self, requests: Sequence[Request], cancelled: Sequence[int]
    ) -> Sequence[tuple[int, Decoded | Exception]]:
        """Take on requests, forget others, and decode for a moment."""
        if cancelled:
            self._engine.abort_request([str(number) for number in cancelled])
        answers: list[tuple[int, Decoded | Exception]] = []
        for request in requests:
            try:
                self._ask(request)
            except ValueError as error:
                answers.append((request.number, GenerationError(f"generate: vLLM refuses a request: {error}")))
        began = time.monotonic()
        while self._engine.has_unfinished_requests():
            answers += [(int(output.request_id), _answer(output, self._routed)) for output in self._engine.step()]
            if tensor_parallel.tp_consensus(time.monotonic() - began > self._times * (_SOON if answers else _LATEST)):
                break
        for number in [*cancelled, *(number for number, _ in answers)]:
            self._requests.pop(number, None)
        return answers

    def _ask(self, request: Request) -> None:
        self._requests[request.number] = request
        prompt = {"prompt_token_ids": list(request.prompt)}
        adapter = None if self._adapter is None else self._adapter.request
        self._engine.add_request(str(request.number), prompt, self._params(request), lora_request=adapter)

    def _params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        if 0 < sampling.temperature < _COLDEST:
            raise ArgumentError(
                f"temperature is {sampling.temperature}, and it would sample at {_COLDEST} without saying so; give 0, "
                f"or at least {_COLDEST}"
            )
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=min(sampling.max_new_tokens, self.context_length - len(request.prompt)),
            seed=int(request.seed) & (2**63 - 1),  # -1 is none for vLLM
            stop_token_ids=[*self._stops, *sampling.stop_token_ids],
            logprobs=0,  # log-probability of the sampled token alone
            flat_logprobs=True,  # lists of numbers, in place of an object for each token
            stop=list(sampling.stop),
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def offload(self) -> None:
        """Leave the device: move weights to the memory of the host, and drop keys and values."""
        weight_loading.reset_cache(self._engine)
        self._engine.sleep(level=1, mode="keep")

    def onload(self) -> None:
        """Go back to the device."""
        self._engine.wake_up()

    def begin(self) -> None:
        """Prepare for new weights."""
        # A receive that broke off has left layers without weights, and vLLM cannot begin anew
        if self._waiting is not None and self._adapter is None:
            tensor_parallel.end(self._engine)
            self._engine = None  # a device may lack room for two
            gc.collect()
            torch.cuda.empty_cache()
            self._start()
            for request in self._requests.values():
                self._ask(request)
        self._waiting, self._fingerprints, self._joining = dict(self._shapes), {}, ShardAssembler()
        if self._engine.is_sleeping():
            self._engine.wake_up(["weights"])  # without keys and values: a trainer may be on the device, too
        if self._adapter is None:
            self._engine.collective_rpc("start_weight_update")

    def add(self, bucket: Bucket) -> None:
        """Load some of the new weights."""
        assert self._waiting is not None
        for piece in bucket:
            check_weight(piece.name, piece.shape, self._shapes, "receive")
        weights = dict(self._joining.add(bucket))  # vLLM takes whole ones, and cuts them itself
        for name, tensor in weights.items():
            self._waiting.pop(name, None)
            if self._adapter is None and (tensor.ndim == 1 or has_checksum(name)):
                self._fingerprints[name] = weight_loading.fingerprint(tensor, self._engine.model_config.dtype)
        if self._adapter is not None:
            self._adapter.add(weights.items())
        else:
            self._engine.collective_rpc("update_weights", kwargs={"update_info": {"tensors": weights}})

    def end(self, version: int) -> None:
        """Use the new weights, and check that vLLM holds them and has dropped older keys and values."""
        assert self._waiting is not None
        check_arrived(self._waiting, "receive")
        if self._adapter is not None:
            self._adapter.replace(self._engine)
        else:
            self._engine.collective_rpc("finish_weight_update")
            self._engine.apply_model(weight_loading.check_head)
            self._engine.apply_model(
                partial(weight_loading.check_loaded, self._fingerprints, self._engine.model_config.dtype)
            )
        self._waiting = None
        weight_loading.reset_cache(self._engine)
        weight_loading.check_cache_reset(self._engine)
        self._engine.set_weight_version(str(version))


def _shapes(folder: Path, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights in a folder."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    return {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}


def _prepare_folder(model: Model, tokenizer: Any, scratch: Path) -> tuple[Path, tuple[int, ...]]:
    """Return a folder that vLLM can read, and the tokens that end a completion."""
    from transformers import GenerationConfig

    folder = _find_files(model) or scratch
    if any(folder.glob("*.safetensors")):
        has = (folder / "generation_config.json").exists()
        generation = GenerationConfig.from_pretrained(folder) if has else None
        return folder, end_tokens(generation, tokenizer)
    module = build(model)
    save_model(module, scratch)
    return scratch, end_tokens(getattr(module, "generation_config", None), tokenizer)


def _find_files(model: Model) -> Path | None:
    try:
        return files(model)
    except Exception as error:  # libraries that it reads files with raise all kinds
        raise ModelError(f"vllm.sampler: the files of '{model.source}' cannot be had from the hub: {error}") from error


def _start_engine(folder: Path, tokenizer: Path, model: Model, options: Mapping[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        args = EngineArgs(
            model=str(folder),
            tokenizer=str(tokenizer),
            logprobs_mode="processed_logprobs",
            **tensor_parallel.arguments(),
            weight_transfer_config=WeightTransferConfig(backend=weight_loading.register_backend()),
            **settings.with_defaults(model, options),
        )
        return LLMEngine.from_engine_args(args)
    except TypeError as error:
        values = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(f"vllm.sampler: {error}; it was given {values or 'none'} of vLLM's EngineArgs") from error
    except (ValueError, RuntimeError) as error:
        room = _MORE if any(text in str(error) for text in _NO_ROOM) else ""
        raise ModelError(f"vllm.sampler: vLLM refuses the model: {error}{room}") from error


def _answer(finished: Any, routed: RoutedExperts | None) -> Decoded | Exception:
    """Read vLLM's ``RequestOutput``, with routes if they are recorded."""
    (output,) = finished.outputs
    decoded = _read_output(output)
    if routed is None:
        return decoded
    try:
        tokens = len(finished.prompt_token_ids) + len(decoded.token_ids) - 1
        return decoded._replace(routes=routed.parse(output.routed_experts, tokens))
    except GenerationError as error:
        return error


def _read_output(output: Any) -> Decoded:
    ids = [int(token) for token in output.token_ids]
    flat = output.logprobs
    assert [flat.token_ids[start] for start in flat.start_indices] == ids  # The sampled token comes first.
    logprobs = [flat.logprobs[start] for start in flat.start_indices]
    versions = torch.empty(len(ids), dtype=torch.int64)
    for span in output.weight_versions:
        versions[span.start : span.end] = int(span.version)
    truncated = output.finish_reason == "length"
    return Decoded(torch.tensor(ids), torch.tensor(logprobs, dtype=torch.float32), truncated, versions)
