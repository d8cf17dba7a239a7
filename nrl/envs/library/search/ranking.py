"""`bm25`: which of many texts fit a query, by the words that they share. numpy is all that it needs."""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from nrl.errors import ArgumentError

__all__ = ["Ranker", "bm25", "words"]

type Ranker = Callable[[str, int], list[tuple[int, float]]]
"""``(query, k) -> [(place, score), ...]``: the best ``k`` texts, the best first; none that does not fit at all."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def words(text: str) -> list[str]:
    """The words of a text without their case, as Unicode's NFKC writes them; each character of Chinese and Japanese.

    >>> words("Ada's ENGINE, 1843; 東京")
    ['ada', 's', 'engine', '1843', '東', '京']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def bm25(texts: Iterable[str], *, k1: float = 1.2, b: float = 0.75) -> Ranker:
    r"""A ranker by Okapi BM25.

    .. math:: \sum_{w} n_w \ln\Big(1 + \frac{N - d_w + 0.5}{d_w + 0.5}\Big)
        \frac{f_w (k_1 + 1)}{f_w + k_1 (1 - b + b\,l / \bar l)}

    Over the words w of the query, n times in it: of N texts d have the word, this one f times; its length is l words,
    the mean length :math:`\bar l`.

    Args:
        texts: read once, for an index in memory of 12 bytes for each different word of each text.
        k1: not negative; how much it counts that a word comes again.
        b: from 0 to 1; how much long texts count less.

    Returns:
        A function, which any number of threads may call. Of texts with equal scores the first comes first.

    Raises:
        ValueError: there are no texts, or ``k1`` or ``b`` is out of its range.

    >>> rank = bm25(["The cat sat.", "A dog.", "Cats and a cat."])
    >>> [place for place, _ in rank("CAT?", 2)], rank("bird", 2)
    ([0, 2], [])

    Source: Robertson, Walker, Jones, Hancock-Beaulieu, Gatford, 1994, "Okapi at TREC-3"; the logarithm's 1, which keeps
    common words from counting against a text, is Lucene's.
    """
    import numpy as np

    if not k1 >= 0 or not 0 <= b <= 1:
        raise ArgumentError(f"bm25: k1 is {k1} and b is {b}; give a k1 of at least 0, and a b from 0 to 1")
    known: dict[str, int] = {}
    terms, lengths = array("q"), array("q")
    for text in texts:
        found = words(text)
        terms.extend([known.setdefault(word, len(known)) for word in found])
        lengths.append(len(found))
    if not lengths:
        raise ArgumentError("bm25: there are no texts; give at least one")
    total, length = len(lengths), np.array(lengths, dtype=np.float64)
    owner = np.repeat(np.arange(total), np.array(lengths))
    pairs, count = np.unique(np.array(terms, dtype=np.int64) * total + owner, return_counts=True)
    term, place = np.divmod(pairs, total)
    having = np.bincount(term, minlength=len(known))
    first = np.concatenate([[0], np.cumsum(having)])  # of each word, in the order of `term`
    rarity = np.log1p((total - having + 0.5) / (having + 0.5))
    norm = k1 * (1 - b + b * length / max(1.0, length.mean()))
    weight = rarity[term] * count * (k1 + 1) / (count + norm[place])
    place = place.astype(np.int32)

    def rank(query: str, k: int) -> list[tuple[int, float]]:
        scores = np.zeros(total)
        for word, times in Counter(words(query)).items():
            if (at := known.get(word)) is not None:
                own = slice(first[at], first[at + 1])
                scores[place[own]] += times * weight[own]
        fitting = np.flatnonzero(scores)
        if len(fitting) > k:
            least = np.partition(scores[fitting], -k)[-k]
            fitting = fitting[scores[fitting] >= least]
        best = fitting[np.lexsort((fitting, -scores[fitting]))][:k]
        return [(int(at), float(scores[at])) for at in best]

    return rank
