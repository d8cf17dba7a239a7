"""`search`, a tool that finds passages of a corpus on this machine, and `searching`, an environment around it."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nrl.envs.library.search import towns
from nrl.envs.library.search.ranking import Ranker, bm25, words
from nrl.envs.library.search.short_answers import short_answer
from nrl.envs.tools import Tool, ToolError, tool, tool_use
from nrl.envs.types import Environment, Verifier
from nrl.errors import ArgumentError, DataError

__all__ = ["Passage", "passages", "search", "searching"]

_ROW = 'a passage is {"id": ..., "title": ..., "text": ...}, of which the text alone has to be there'


class Passage(NamedTuple):
    """A text that can be found.

    Args:
        id: its name in the corpus.
        title: of what it is a part of; may be empty.
        text: what it says.

    >>> Passage("7", "Ada Lovelace", "She wrote the first program.").title
    'Ada Lovelace'
    """

    id: str
    title: str
    text: str


def passages(corpus: str | Path | Iterable[Mapping[str, Any]]) -> list[Passage]:
    """The passages of a corpus.

    Args:
        corpus: a file of JSON Lines, or mappings, with ``"text"``, and ``"title"`` and ``"id"`` if there are such; a
            passage without an id has its place, from 0.

    Raises:
        DataError: the file is not there, or a row is no passage, or two have one id; it names the row.

    >>> passages([{"title": "Ada Lovelace", "text": "She wrote the first program."}])
    [Passage(id='0', title='Ada Lovelace', text='She wrote the first program.')]
    """
    if isinstance(corpus, str | Path):
        found = [_passage(*row) for row in _lines(Path(corpus))]
    else:
        found = [_passage(f"passage {at}", at, row) for at, row in enumerate(corpus)]
    if not found:
        raise DataError("search: the corpus has no passages; give at least one")
    places: dict[str, int] = {}
    for at, each in enumerate(found):
        if (before := places.setdefault(each.id, at)) != at:
            raise DataError(f"search: passages {before} and {at} of the corpus have the id {each.id!r}; rename one")
    return found


def search(
    corpus: str | Path | Iterable[Mapping[str, Any]],
    *,
    k: int = 3,
    characters: int = 1000,
    query: int = 300,
    ranker: Callable[[Sequence[str]], Ranker] = bm25,
    name: str = "search",
) -> Tool:
    """A tool that finds the passages of a corpus that fit a query best. It needs no server.

    A model is told, as of any mistake of its own, where a query has no word or is too long; where nothing fits, that is
    the result.

    Args:
        corpus: as `passages` takes it; it is read, and its index made, at once.
        k: how many passages a result has, at most.
        characters: of a passage's text that are shown; the rest is cut.
        query: characters that a query may have.
        ranker: makes a ranker of all titles and texts.
        name: of the tool.

    Raises:
        DataError: as `passages` does.
        ValueError: ``k``, ``characters`` or ``query`` is not positive.

    >>> found = search([{"title": "Ada Lovelace", "text": "She wrote the first program."}, {"text": "Bees dance."}])
    >>> print(found.fn(query="Who wrote a program?"))
    [1] Ada Lovelace
    She wrote the first program.
    >>> found.fn(query="zebra")
    'No passage has any of these words. Try others.'
    """
    for option, value in (("k", k), ("characters", characters), ("query", query)):
        if value < 1:
            raise ArgumentError(f"search: {option} is {value}; it must be at least 1")
    longest, known = query, passages(corpus)
    rank = ranker([f"{each.title}\n{each.text}" for each in known])

    def find(query: str) -> str:
        """Search a collection of texts. Returns the passages that fit the query best, the best first.

        Args:
            query: words to look for.
        """
        if len(query) > longest:
            raise ToolError(f"the query has {len(query)} characters, and may have {longest}; write a shorter one")
        if not words(query):
            raise ToolError("the query has no word in it; write what to look for")
        found = [known[at] for at, _ in rank(query, k)]
        shown = (_shown(number, each, characters) for number, each in enumerate(found, 1))
        return "\n\n".join(shown) or "No passage has any of these words. Try others."

    return tool(find, name=name)


def searching(
    corpus: str | Path | Iterable[Mapping[str, Any]] | None = None,
    verifier: Verifier = short_answer,
    *,
    k: int = 3,
    characters: int = 1000,
    query: int = 300,
    turns: int = 6,
    calls: int = 12,
    hops: int | None = None,
) -> Environment:
    """The environment that asks a task's prompt, and lets the model search a corpus until it answers.

    Args:
        corpus: as `passages` takes it. None: the invented one of `nrl.envs.library.search.towns`, which has tasks, too.
        verifier: has the last word.
        k: how many passages a result has, at most.
        characters: of a passage's text that are shown.
        query: characters that a query may have.
        turns: of the model, at most; it has to answer in the last one.
        calls: of the tool in an episode, at most.
        hops: of the tasks that it brings, as of `nrl.envs.library.search.towns.task`.

    Returns:
        `nrl.envs.tools.tool_use` with the tool `search`. Where the corpus is the invented one, it brings tasks.

    Raises:
        DataError: as `passages` does, or ``hops`` is neither 1 nor 2.
        ValueError: a number is not positive.

    >>> from nrl.envs import Trace
    >>> env = searching()
    >>> task = env.tasks(0, 0)
    >>> state, prompt, (finding,) = env.reset(task)
    >>> finding.name, env.verifier(task, Trace(prompt, [f"<answer>{task['answer']}</answer>"])).reward
    ('search', 1.0)
    """
    for option, value in (("turns", turns), ("calls", calls)):
        if value < 1:
            raise ArgumentError(f"searching: {option} is {value}; it must be at least 1")
    own = None
    if corpus is None:
        corpus, own = towns.passages(), functools.partial(towns.task, hops=hops)
        own(0, 0)  # it checks its arguments
    found = search(corpus, k=k, characters=characters, query=query)
    return tool_use([found], verifier, turns=turns, calls=calls)._replace(tasks=own)


def _shown(number: int, passage: Passage, most: int) -> str:
    text = passage.text if len(passage.text) <= most else passage.text[:most].rstrip() + " ..."
    return f"[{number}] {passage.title}\n{text}" if passage.title else f"[{number}] {text}"


def _lines(file: Path) -> Iterable[tuple[str, int, Any]]:
    if not file.is_file():
        raise DataError(f"search: there is no file {file}; give the JSON Lines of a corpus")
    with file.open(encoding="utf-8") as lines:
        at = 0
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}:{number}", at, json.loads(line)
                    at += 1
        except ValueError as error:  # no JSON, or no UTF-8
            raise DataError(f"search: {file}, behind row {at}: {error}; write a JSON object a line") from error


def _passage(place: str, at: int, row: Any) -> Passage:
    if not isinstance(row, Mapping):
        raise DataError(f"search: {place} is {row!r:.100}; {_ROW}")
    text, title, own = row.get("text"), row.get("title") or "", row.get("id")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"search: {place} has the text {text!r:.100}; {_ROW}")
    if not isinstance(title, str):
        raise DataError(f"search: {place} has the title {title!r:.100}; give a text, or none")
    return Passage(str(at) if own is None else str(own), title.strip(), text.strip())
