"""The shape of a Transformer, read from its config, for closed forms."""

from collections.abc import Mapping
from typing import Any

import attrs

from nrl.errors import ModelError

__all__ = ["FAMILIES", "Shape", "read_shape"]

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""The types of models whose layers closed forms describe."""


@attrs.frozen
class Shape:
    """A model of one of `FAMILIES`; all sizes are counts of numbers.

    Args:
        hidden: d, the width of hidden states.
        layers: L.
        heads: H, of queries.
        groups: h, heads of keys and values.
        head: D, the size of a head.
        intermediate: f, of a dense MLP.
        words: V, the vocabulary.
        tied: whether the head has the weight of the embedding.
        norms: whether queries and keys are normalised.
        biases: numbers in the biases of a layer.
        experts: E, of a layer that has some.
        chosen: k, the experts of a token.
        expert: m, the intermediate size of one.
        sparse: how many layers have experts.
    """

    hidden: int
    layers: int
    heads: int
    groups: int
    head: int
    intermediate: int
    words: int
    tied: bool
    norms: bool = False
    biases: int = 0
    experts: int = 0
    chosen: int = 0
    expert: int = 0
    sparse: int = 0

    @property
    def queries(self) -> int:
        """``H D``."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """``h D``."""
        return self.groups * self.head

    @property
    def projections(self) -> int:
        """Weights of attention's four matrices: ``2 d D (H + h)``."""
        return 2 * self.hidden * (self.queries + self.keys)

    @property
    def dense(self) -> int:
        """Parameters of a layer with a dense MLP: projections, biases, norms and ``3 d f``."""
        return self._rest + 3 * self.hidden * self.intermediate

    @property
    def mixture(self) -> int:
        """Parameters of a layer with experts: ``3 d m E`` and the router's ``d E``."""
        return self._rest + (3 * self.expert + 1) * self.hidden * self.experts

    @property
    def _rest(self) -> int:
        return self.projections + self.biases + 2 * self.hidden + (2 * self.head if self.norms else 0)

    @property
    def matrices(self) -> int:
        """Parameters of all matrices in layers, those of experts and routers too."""
        plain = 3 * self.hidden * self.intermediate * (self.layers - self.sparse)
        return self.layers * self.projections + plain + self.sparse * (3 * self.expert + 1) * self.hidden * self.experts

    @property
    def largest(self) -> int:
        """Parameters of the largest layer."""
        return max(self.mixture if self.sparse else 0, self.dense if self.sparse < self.layers else 0)

    @property
    def in_layers(self) -> int:
        """Parameters of all layers."""
        return self.sparse * self.mixture + (self.layers - self.sparse) * self.dense

    @property
    def outside(self) -> int:
        """Parameters of no layer: the embedding, the head, and the last norm."""
        return (1 if self.tied else 2) * self.words * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        return self.in_layers + self.outside

    @property
    def active_weights(self) -> int:
        """Weights of matrices in layers that a token is multiplied with, those of the experts that it is sent to."""
        experts = 3 * self.hidden * self.expert * self.chosen + self.hidden * self.experts
        plain = 3 * self.hidden * self.intermediate
        return self.layers * self.projections + self.sparse * experts + (self.layers - self.sparse) * plain


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first of some fields that a config has."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ModelError(f"plan: the config of this {config['model_type']} model has no {' or '.join(names)}; give it")


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Read the shape of a model from a transformers config.

    Args:
        config: all of its fields, with ``model_type``; of those that transformers fills in, ``head_dim`` may be absent.

    Raises:
        ModelError: the model is of another type, or a field is missing.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(
            f"plan: found a model of type '{kind}'; closed forms know {', '.join(FAMILIES)}. Drive it "
            "(driven=true), by trainer=fsdp and without search=true, which have nothing but closed forms"
        )
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    if missing := [name for name in needed if name not in config]:
        raise ModelError(f"plan: the config of this {kind} model has no {', '.join(missing)}; give it")
    d, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    head = config.get("head_dim") or d // heads
    groups = config.get("num_key_value_heads") or heads
    has_biases = bool(config.get("attention_bias"))
    biases = head * (heads + 2 * groups) if has_biases or kind == "qwen2" else 0
    if kind == "llama" and config.get("mlp_bias"):
        biases += 2 * config["intermediate_size"] + d
    experts = {}
    if kind in ("mixtral", "qwen3_moe"):
        skipped = {*(config.get("mlp_only_layers") or ())}
        step = config.get("decoder_sparse_step", 1)
        experts = {
            # A published config has num_experts, and transformers from 5.19 on num_local_experts
            "experts": _first(config, "num_experts", "num_local_experts"),
            "chosen": _first(config, "num_experts_per_tok"),
            "expert": _first(config, "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"),
            "sparse": sum(i not in skipped and (i + 1) % step == 0 for i in range(layers)),
        }
    return Shape(
        d, layers, heads, groups, head, config["intermediate_size"], config["vocab_size"],
        bool(config.get("tie_word_embeddings", False)), kind in ("qwen3", "qwen3_moe"),
        biases + (d if has_biases else 0),
        **experts,
    )  # fmt: skip
