"""Write docs/losses.md from the docstrings of nrl.algos: ``python docs/make_losses.py``; with ``--check``, compare."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "losses.md"

SECTIONS = {
    "Losses of policies": ("losses",),
    "Their parts: ratios and surrogates": ("ratios", "surrogates"),
    "Their parts: the mismatch of sampler and trainer": ("corrections", "selections", "mismatch"),
    "Their parts: divergences, penalties, entropy": ("divergences", "entropy"),
    "Their parts: how tokens are added up": ("aggregate",),
    "Advantages, on the driver": ("groups", "baselines", "estimators", "returns", "kl_rewards"),
    "Rewards reshaped, rows and tokens left out, on the driver": ("shaping",),
    "Preferences": ("preferences", "pairs", "scores", "links", "unpaired", "reward_models"),
    "Distillation": ("distillation",),
    "Supervised": ("supervised",),
}
OTHERS = ("masking", "protocol")
"""Modules that hold no method."""

HEAD = """# Methods

Every loss, estimator and shaping of `nrl.algos`, with its equation and where it is from. Made from the docstrings by
`python docs/make_losses.py`; `help(nrl.algos.<name>)` has arguments, shapes, an example, what libraries do otherwise.

A method of the field is a composition of these:

```python
from nrl import algos
from nrl.algos import clip, icepop, k3, kl, policy_loss, seq_mean

grpo = policy_loss(clip(0.2), penalty=kl(k3, 0.04), aggregate=seq_mean)
grpo_for_a_fast_sampler = policy_loss(clip(0.2), correction=icepop(0.5, 5.0), aggregate=seq_mean)
with_a_bonus = algos.add((1.0, algos.dapo_loss), (-0.01, algos.entropy_loss))
```
"""


def main(check: bool) -> int:
    """Write the page, or say whether it is as it would be written."""
    page = "\n".join([HEAD, *written()]) + "\n"
    if not check:
        PAGE.write_text(page)
        return 0
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    sys.stderr.write("docs/losses.md is not what the docstrings say; run `python docs/make_losses.py`\n")
    return 1


def written() -> Iterator[str]:
    """The lines of all sections."""
    folder = Path(__file__).parents[1] / "nrl" / "algos"
    there = {path.stem for path in folder.glob("[!_]*.py")} - {*OTHERS}
    listed = [module for modules in SECTIONS.values() for module in modules]
    if missing := there ^ set(listed):
        raise SystemExit(f"docs/make_losses.py: SECTIONS and nrl/algos/ differ in {', '.join(sorted(missing))}")
    for title, modules in SECTIONS.items():
        yield f"## {title}\n"
        yield "| | | equation | source |\n|---|---|---|---|"
        for name in modules:
            module = importlib.import_module(f"nrl.algos.{name}")
            for public in module.__all__:
                value = getattr(module, public)
                if callable(value) and not isinstance(value, type):
                    yield row(public, value)
        yield ""


def row(name: str, value: Any) -> str:
    """A line of a table."""
    doc = inspect.cleandoc(value.__doc__ or "")
    summary, _, rest = doc.partition("\n")
    equations = re.findall(r"(?:^    .*\n?)+", rest.split("\nArgs:")[0].split("\n>>>")[0], re.MULTILINE)
    lines = [line.strip() for block in equations[:1] for line in block.strip("\n").splitlines()]
    found = re.search(r"^Sources?: (.+?)(?:\n\n|\Z)", doc, re.MULTILINE | re.DOTALL)
    source = " ".join(found[1].split()) if found else ""
    cells = (
        f"`{name}{arguments(value)}`",
        marked(summary),
        "<br>".join(f"`{line.replace('``', '').replace('|', '∣').replace('](', '] (')}`" for line in lines),
        re.sub(r"https?://(?:www\.)?(?:arxiv\.org/abs/)?([^\s,;]+)", link, marked(source)),
    )
    return f"| {' | '.join(cells)} |"


def arguments(value: Any) -> str:
    """What a factory takes; nothing for a function that is a part or a loss itself."""
    parameters = inspect.signature(value).parameters.values()
    names = {each.name for each in parameters}
    if names & {"out", "batch", "logprobs", "log_ratio", "x", "rewards", "student"}:
        return ""
    return f"({', '.join(each.name for each in parameters)})"


def marked(text: str) -> str:
    """A docstring's line as Markdown."""
    return text.replace("``", "`").replace("|", "\\|")


def link(found: re.Match[str]) -> str:
    """A web address, short where it is arXiv's."""
    address, short = found[0].rstrip("."), found[1].rstrip(".")
    shown = f"arXiv:{short}" if "arxiv.org/abs" in address else short
    return f"[{shown}]({address}){'.' if found[0].endswith('.') else ''}"


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
