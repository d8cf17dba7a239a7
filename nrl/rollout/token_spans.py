"""The text of each token of a row, such that joined they are the decoded row."""

import codecs
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

__all__ = ["decode", "split_text"]

# The characters that byte-level tokenizers write bytes as: printable ones as they are, the others from 256 on.
_BYTES = {chr(byte): byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
_BYTES |= {chr(256 + index): byte for index, byte in enumerate(byte for byte in range(256) if chr(byte) not in _BYTES)}


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens to text, including special ones."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def split_text(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined they are the decoded text."""
    text = decode(tokenizer, ids)
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(ids)]  # a model may have more than its tokenizer
    for spelt in (_byte_level_bytes, _sentence_piece_bytes):
        texts = _decode_pieces([spelt(token) for token in tokens])
        if texts and texts[0].removeprefix(" ") + "".join(texts[1:]) == text:
            texts[0] = texts[0].removeprefix(" ")  # Sentencepiece adds this space before a text, and removes it again.
        if "".join(texts) == text:
            return texts
    # A tokenizer of another kind: decode each beginning and take the difference. Quadratic, so the last resort.
    ends = [_common_prefix_length(text, decode(tokenizer, ids[:count])) for count in range(1, len(ids))]
    cuts = np.maximum.accumulate([0, *ends, len(text)]).tolist()
    return [text[start:end] for start, end in pairwise(cuts)]


def _common_prefix_length(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _byte_level_bytes(token: str) -> bytes:
    """An added token, such as one with a space, is not spelt in bytes."""
    return bytes(map(_BYTES.__getitem__, token)) if _BYTES.keys() >= set(token) else token.encode()


def _sentence_piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()


def _decode_pieces(spelt: Sequence[bytes]) -> list[str]:
    """Bytes as text, where a character belongs to the token that completes it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(spelt) - 1
    return [decoder.decode(piece, final=index == last) for index, piece in enumerate(spelt)]
