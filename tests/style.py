"""Measures of how a package reads: its names, its sentences, its files. ``python -m tests.style`` prints them."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

PARTICIPLES = frozenset(
    """apart asked begun brought built cut done drawn found given heard held kept known left lost made read said seen
    sent spoken taken there thought told written""".split()  # noqa: SIM905 - a table of words
)
NO_PARTICIPLES = frozenset({"bed", "embed", "feed", "need", "red", "seed", "shared", "speed", "typed"})
VAGUE = frozenset(
    """asked at both each every found given here how it kept known left made more most now one others own place said
    several some that them then there this told two wanted way what when who whole why""".split()  # noqa: SIM905
)
QUESTION = re.compile(r"(?:As|For|How|Of|That|Those|What|When|Where|Whether|Which|Who|Why)\b")
QUESTION_MODULE = re.compile(r"(?:As|How|That|Those|What|When|Where|Whether|Which|Who|Why)\b")
PRONOUN = re.compile(
    r"\b(?:it|none|others|so|some|such|that|them|there|they|those|what|whatever|which|who|whoever|whom)\b"
)
FRAGMENT = re.compile(
    r"(?:and|as|but|by|for|from|in|of|one|others|so|than|that|there|those|to|what|where|which|who|whom|whose|with)\b"
)
STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""'
    r"|'''(?:[^\\]|\\.)*?'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'|(#[^\n]*)",
    re.DOTALL,
)
REPEATABLE_MODULES = frozenset({"__init__", "base", "types"})
MODULE_LINES = 400
ROOM_FILES = 20
LARGE_ROOMS = frozenset({"nrl/algos"})  # flat by design: a topic a file

type Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Measure(NamedTuple):
    """A count in percent, per 1,000 lines, or by itself, and where what it counts stands."""

    value: float
    offenders: tuple[str, ...]  # "nrl/data/rows.py:12 found"


class Share:
    """Offenders among all things of a kind, weighted by how much of them offends."""

    def __init__(self, scale: float = 100) -> None:
        self.scale, self.total, self.count, self.offenders = scale, 0, 0, list[str]()

    def add(self, offends: int, path: str, line: int, label: str = "", total: int = 1) -> None:
        """Count a thing, and keep its place if it offends."""
        self.total += total
        if offends:
            self.count += offends
            self.offenders.append(f"{path}:{line} {label}")

    def measure(self) -> Measure:
        """Return the share of offenders."""
        return Measure(self.scale * self.count / max(self.total, 1), tuple(self.offenders))


def measure(sources: Mapping[str, str]) -> dict[str, Measure]:
    """Return each measure of a package by name.

    Args:
        sources: the text of each module by path, such as "nrl/data/rows.py".
    """
    names = "participle functions", "vague locals", "vague parameters", "question docstrings", "question modules"
    shares = {name: Share() for name in (*names, "pronouns", "comment fragments", "comment lines", "prose lines")}
    shares["Any per 1000 lines"] = Share(1000)
    classes: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    long_modules, rooms = list[str](), Counter[str]()
    for path, source in sources.items():
        nodes = list_nodes(ast.parse(source))
        count_names(path, nodes, shares)
        count_prose(path, nodes, source, shares)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(f"{path}:{node.lineno}")
        if (stem := Path(path).stem) not in REPEATABLE_MODULES:  # one name within a top-level room
            modules.setdefault(f"{'.'.join(Path(path).parts[1:-1][:1])}.{stem}".lstrip("."), []).append(path)
        if (lines := source.count("\n")) > MODULE_LINES:
            long_modules.append(f"{path} {lines} lines")
        rooms[str(Path(path).parent)] += 1
    measures = {name: share.measure() for name, share in shares.items()}
    for name, places in {"repeated classes": classes, "repeated modules": modules}.items():
        repeated = {key: where for key, where in places.items() if len(where) > 1}
        offenders = tuple(f"{key}: {', '.join(where)}" for key, where in repeated.items())
        measures[name] = Measure(len(repeated), offenders)
    measures["long modules"] = Measure(len(long_modules), tuple(long_modules))
    full = {room: count for room, count in rooms.items() if count > ROOM_FILES and room not in LARGE_ROOMS}
    offenders = tuple(f"{room} {count} files" for room, count in full.items())
    measures["files beyond a room"] = Measure(sum(full.values()) - ROOM_FILES * len(full), offenders)
    return measures


def list_nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes, outer ones first, but contexts and operators; faster than ast.walk."""
    nodes = [tree]
    for node in nodes:  # the list grows while it is read
        for value in vars(node).values():
            if isinstance(value, list):
                nodes.extend(item for item in value if isinstance(item, ast.AST))
            elif isinstance(value, ast.AST) and value._fields:
                nodes.append(value)
    return nodes


def count_names(path: str, nodes: Iterable[ast.AST], shares: Mapping[str, Share]) -> None:
    """Count functions, parameters and locals of a module."""
    variables, annotations = shares["vague locals"], shares["Any per 1000 lines"]
    for node in nodes:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                if node.id not in {"_", "__all__"}:
                    variables.add(node.id in VAGUE, path, node.lineno, node.id)
            elif node.id == "Any":
                annotations.add(True, path, node.lineno, node.id, total=0)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            shares["participle functions"].add(is_participle(node.name), path, node.lineno, node.name)
            for argument in (*node.args.args, *node.args.kwonlyargs):
                label = f"{node.name}({argument.arg})"
                shares["vague parameters"].add(argument.arg in VAGUE, path, node.lineno, label)


def count_prose(path: str, nodes: Iterable[ast.AST], source: str, shares: Mapping[str, Share]) -> None:
    """Count docstrings and comments, and lines of prose and of code, of a module."""
    prose = set[int]()
    for node in nodes:
        if isinstance(node, Documented.__value__) and (text := ast.get_docstring(node)) is not None:
            line, last = node.body[0].lineno, node.body[0].end_lineno or 0
            prose.update(range(line, last + 1))
            first, words = text.partition("\n")[0], text.split()
            if isinstance(node, ast.Module):
                shares["question modules"].add(bool(QUESTION_MODULE.match(first)), path, line, first)
            elif text:
                shares["question docstrings"].add(bool(QUESTION.match(first)), path, line, first)
                shares["pronouns"].add(len(PRONOUN.findall(text.lower())), path, line, first, len(words))
    for match in STRING_OR_COMMENT.finditer(source):
        if (comment := match[1]) and not re.search(r"noqa|type:|^#!", comment):
            text, line = comment.lstrip("# ").strip(), source.count("\n", 0, match.start()) + 1
            shares["comment fragments"].add(bool(FRAGMENT.match(text)), path, line, f"# {text}")
    for number, line in enumerate(source.splitlines(), 1):
        alone = line.lstrip().startswith("#") and number not in prose
        shares["comment lines"].add(alone, path, number)
        shares["prose lines"].add(alone or number in prose, path, number)
        if line.strip() and not alone and number not in prose:
            shares["Any per 1000 lines"].total += 1


def is_participle(name: str) -> bool:
    """Return whether a name is one word, and that a participle."""
    word = name.strip("_")
    if "_" in word or word in NO_PARTICIPLES:
        return False
    return word in PARTICIPLES or re.search(r"[a-z]{2}ed$", word) is not None


def describe_worst(offenders: Iterable[str], count: int = 5) -> str:
    """Return the files that have most offenders, and the first of them."""
    files = Counter(offender.partition(":")[0].partition(" ")[0] for offender in offenders)
    first: dict[str, str] = {}
    for offender in offenders:
        first.setdefault(offender.partition(":")[0].partition(" ")[0], offender)
    return "\n".join(f"  {number} x {file}, such as {first[file]}" for file, number in files.most_common(count))


def read_package(package: Path = ROOT / "nrl") -> dict[str, str]:
    """Return the text of each module by its path from the package's parent."""
    return {str(file.relative_to(package.parent)): file.read_text() for file in sorted(package.rglob("*.py"))}


if __name__ == "__main__":
    for name, (value, offenders) in measure(read_package()).items():
        print(f"{name:22} {value:8.2f}  {len(offenders)} places\n{describe_worst(offenders, 3)}")
