"""Tokenizers with the chat templates and the special tokens of real model families, trained here on a few words."""

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nrl import tiny

TEMPLATES = Path(__file__).parent / "data" / "templates"

LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
QWEN = {"eos_token": "<|im_end|>"}
SPECIAL = {
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
WORDS = """system user assistant model Hi Hello Bye Thanks Be brief . You are a helpful Qwen , created by Alibaba Cloud
Cutting Knowledge Date : December Today Jul think Hmm"""
# How Llama 3 and Qwen split a text: line ends join what is before them, and each other.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def template(name: str) -> str:
    return tiny.CHATML if name == "chatml" else (TEMPLATES / f"{name}.jinja").read_text()


@cache
def tokenizer(name: str) -> Any:
    """A tokenizer with the template of this name: ``chatml``, or a file of `TEMPLATES`."""
    family = "qwen" if name == "chatml" or name.startswith("qwen") else "llama3"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = WORDS.split()
    texts = [*words, *(f" {word}" for word in words), "\n\n"] * 2  # each word a token, with and without a space before
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL[family]])
    if name.startswith("qwen3"):
        made.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    named = LLAMA if family == "llama3" else QWEN
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template(name), clean_up_tokenization_spaces=False, **named
    )


def strings(ids: Any, of: Any) -> list[str]:
    """Each token as the text that it stands for."""
    return [of.decode([int(token)]) for token in ids]
