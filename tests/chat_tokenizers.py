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
DEEPSEEK = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>"}
GLM = {"eos_token": "<|endoftext|>"}
GPT = {"eos_token": "<|return|>"}
MISTRAL = {"bos_token": "<s>", "eos_token": "</s>"}
NAMED = {
    "llama3": LLAMA,
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "glm": GLM,
    "gpt": GPT,
    "mistral": MISTRAL,
}
SPECIAL = {
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "deepseek": [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "glm": ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "gpt": [
        *("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        *("<|end|>", "<|return|>", "<|call|>"),
    ],
    "mistral": [
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[CALL_ID]"),
        *("[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ],
}
THINKS = ("qwen3", "deepseek", "glm")  # whose <think> is a token, and not a special one
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
    family = next((each for each in SPECIAL if name.startswith(each)), "qwen")
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
    if name.startswith(THINKS):
        made.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template(name), clean_up_tokenization_spaces=False, **NAMED[family]
    )


def strings(ids: Any, of: Any) -> list[str]:
    """Each token as the text that it stands for."""
    return [of.decode([int(token)]) for token in ids]
