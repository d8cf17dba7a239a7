"""Small tokenizers and models made on the spot, so that the examples run on a laptop with no download.

`tokenizer` and `model` belong together: one token a character, 0.4 million parameters with random weights, enough to
learn to add, which `sums` begins. `bpe` makes a tokenizer of the kind that real models have, with a chat template;
`save` writes a model folder of the kind that the Hugging Face hub gives.
"""

import difflib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from nrl.backends.models.loading import build, load_tokenizer, save_model
from nrl.backends.types import Model
from nrl.errors import DataError, ModelError

__all__ = ["ALPHABET", "CHATML", "bpe", "model", "model_or", "save", "sums", "tokenizer"]

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that `tokenizer` knows: the newline and printable ASCII.

>>> len(ALPHABET)
96
"""

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    '{{ \'Write <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call> to call one.<|im_end|>\n\' }}{% endif %}'
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}<tool_call>{{ '\n{\"name\": \"' + call['function']['name'] }}"
    "{{ '\", \"arguments\": ' + call['function']['arguments'] | tojson + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of `bpe`: each message between ``<|im_start|>role`` and ``<|im_end|>``.

Tools stand in front, in a message of the system, and calls are written as Hermes and Qwen write them.

>>> from nrl.envs.tools import tool_format
>>> tool_format(CHATML)
'hermes'
"""


def tokenizer() -> Any:
    """A transformers tokenizer with a token for each character of `ALPHABET`.

    Besides them it has ``<pad>``, ``<bos>``, ``<eos>`` and ``<unk>``, none of which it adds to a text, and no chat
    template. Decoding gives text over the alphabet back exactly; any other character is ``<unk>``.

    >>> made = tokenizer()
    >>> made.decode(made.encode("7+12 = 19\\n")), len(made)
    ('7+12 = 19\\n', 100)
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: index for index, token in enumerate([*special.values(), *ALPHABET])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **special)


def model(*, tokenizer: Any = None, seed: int = 0, **overrides: Any) -> Model:
    """A Qwen3-shaped model with random weights: 406,784 parameters and a context of 512 tokens, with `tokenizer`.

    It has 2 layers of width 128, 4 heads of 32, 2 of them for keys and values, and embeddings that are tied.

    Args:
        tokenizer: another transformers tokenizer; the model gets its vocabulary and its special tokens.
        seed: of the random weights.
        **overrides: fields of the config, such as ``num_hidden_layers=4``; also ``dtype``, ``head``, ``lora``,
            ``train_pad_embedding`` and ``trust_remote_code`` of `nrl.backends.Model`.

    Raises:
        ModelError: the config has no such field.

    >>> model().source["hidden_size"], model(hidden_size=64, seed=3).source["hidden_size"]
    (128, 64)
    """
    from transformers import AutoConfig

    made = _characters() if tokenizer is None else tokenizer
    fields: dict[str, Any] = {name: overrides.pop(name) for name in _OF_MODEL if name in overrides}
    config = {
        "model_type": "qwen3",
        "vocab_size": len(made),
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "max_position_embeddings": 512,
        "initializer_range": 0.09,  # about 1 / sqrt(hidden_size); the usual 0.02 suits widths in the thousands
        "tie_word_embeddings": True,
        "bos_token_id": made.bos_token_id,
        "eos_token_id": made.eos_token_id,
        "pad_token_id": made.pad_token_id,
    } | overrides
    known = set(AutoConfig.for_model(config["model_type"]).to_dict())
    for name in overrides.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "give fields of its transformers config"
        raise ModelError(f"tiny.model: a {config['model_type']} config has no field '{name}'; {hint}")
    return Model(config, tokenizer=made, seed=seed, **fields)


def model_or(source: str | None, **fields: Any) -> Model:
    """The model that a folder or a hub name has; the tiny one, where none is named.

    Args:
        source: of `nrl.backends.Model`.
        **fields: ``dtype``, ``head``, ``lora``, ``train_pad_embedding`` and ``trust_remote_code`` of either; others
            are the tiny model's alone: its ``tokenizer``, its ``seed``, and fields of its config.

    Raises:
        ModelError: the tiny model's config has no such field.

    >>> model_or("Qwen/Qwen3-0.6B", dtype="bfloat16", num_hidden_layers=4).dtype
    'bfloat16'
    >>> model_or(None, num_hidden_layers=4).source["num_hidden_layers"]
    4
    """
    if source is None:
        return model(**fields)
    return Model(source, **{name: value for name, value in fields.items() if name in _OF_MODEL})


_OF_MODEL = ("dtype", "head", "lora", "train_pad_embedding", "trust_remote_code")
_characters = tokenizer  # model's argument hides the name


def bpe(texts: Iterable[str], vocab_size: int = 2048) -> Any:
    """A byte-level BPE tokenizer that is trained on ``texts`` and has the chat template `CHATML`, which knows tools.

    Any text is encoded and decoded back exactly. It adds no special tokens; ``<|im_end|>`` ends a sequence.

    Args:
        texts: what to learn merges from.
        vocab_size: the most tokens, of which 256 are bytes and 3 special; few texts give fewer.

    Raises:
        DataError: ``vocab_size`` is less than 259, or ``texts`` is one string.

    >>> made = bpe(["the cat and the hat"], vocab_size=264)
    >>> made.decode(made.encode("the bat é")), len(made)
    ('the bat é', 264)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise DataError(
            f"tiny.bpe: vocab_size is {vocab_size}; 256 bytes and {len(special)} special tokens need at least "
            f"{len(alphabet) + len(special)}"
        )
    if isinstance(texts, str):
        raise DataError("tiny.bpe: texts is one string; give several, such as [text]")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def sums(n: int, seed: int = 0) -> Any:
    """A stream of batches of ``n`` sums with their right answers, for supervised steps of `model`.

    So that reinforcement learning has a reward to start from, as that of a real model has been trained to.

    >>> batch = sums(4).take(1)[0]
    >>> len(batch), bool(batch["loss_mask"].any(-1).all())
    (4, True)
    """
    from nrl import data
    from nrl.rollout.transforms import batched

    characters = _characters()
    collate = partial(data.supervised, tokenizer=characters)
    return batched(data.tasks("arithmetic", seed=seed), n, collate=collate)


def save(model: Model, folder: str | Path) -> None:
    """Write config, weights and tokenizer in Hugging Face format, so that ``Model(folder)`` loads them.

    Args:
        model: as `model` makes it, or any other.
        folder: made if it is not there; files of the same names are replaced.

    Raises:
        ModelError: the model or its tokenizer cannot be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model(), folder)
    ...     sorted(path.name for path in Path(folder).iterdir())[:2]
    ['config.json', 'generation_config.json']
    """
    save_model(build(model), folder)
    load_tokenizer(model).save_pretrained(folder)
