"""Write docs/losses.md from the docstrings of nrl.algos: ``python docs/make_losses.py``; with ``--check``, compare."""

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nrl.algos

PAGE = Path(__file__).parent / "losses.md"

SECTIONS = {
    "Losses of policies": ("losses",),
    "Their parts: ratios and surrogates": ("ratios", "surrogates"),
    "Their parts: the mismatch of sampler and trainer": ("corrections", "token_filters", "mismatch"),
    "Their parts: divergences, penalties, entropy": ("divergences", "entropy"),
    "Their parts: how tokens are added up": ("aggregate",),
    "Advantages, on the driver": ("groups", "baselines", "estimators", "returns", "kl_rewards"),
    "Rewards reshaped, rows and tokens left out, on the driver": ("shaping",),
    "Preferences": ("preferences", "pairwise", "answer_scores", "link_functions", "unpaired", "reward_models"),
    "Distillation": ("distillation",),
    "Supervised": ("supervised",),
    "Critics": ("critics",),
    "Measures of an evaluation": ("pass_at_k",),
}
OTHERS = ("masking", "loss_contract")
"""Modules without a method."""

HEAD = """# Methods

This page lists every loss, estimator, shaping and measure of `nrl.algos`, with its equation and source. It is made from
the docstrings by `python docs/make_losses.py`. `help(nrl.algos.<name>)` adds arguments, shapes, an example, and what
other libraries do differently.

A method of the field is a composition of these, on the driver and in the step:

```python notest
batch = shaping(batch)                                # rewards reshaped
batch = nrl.algos.advantages(batch, estimator)
batch = narrowing(batch)                              # rows and tokens left out of the loss
state, metrics = trainer.train_step(loss)(state, batch)
```

An episode that [forked](episodes.md#tokens-are-never-guessed) has several rows, and each of its trained tokens lies in
one of them. Advantages, shaping and losses count it once:

- `token_mean` counts tokens, which no fork changes: `dapo_loss`, `cispo_loss`, `dppo_loss`, `vespo_loss`,
  `decoupled_ppo_loss`, `sft_loss`, `weighted_sft_loss` and `entropy_loss`, and what `value_loss` and
  `distillation_loss` do unless told otherwise.
- `seq_mean` and `seq_sum` count episodes: `grpo_loss`, `dr_grpo_loss`, `gspo_loss`, `gmpo_loss`, `sapo_loss` and
  `reinforce_loss`. In their equations B is the number of episodes, and y_i all that was sampled in one. So it is in
  every other loss over rows that they are the `aggregate` of.
- Ratios, corrections and selections of whole rows are those of each row of a fork: `sequence_ratio`, `geometric_ratio`,
  `product_ratio`, `sequence_truncate`, `sequence_mask` and `opsm`. Rows may lie in different processes, where a loss
  can read no others. And each row is what was sampled behind a context of its own.
- Preferences, `kto_loss` and reward models compare given answers: they count pairs or rows, and no episodes.

A training step writes the column `episode_shares` where an episode has several rows of its batch
([0056](decisions/0056-a-row-is-a-share-of-its-episode.md)). A loss that is called by hand on a whole batch needs no
column. For parts of a batch that you cut yourself, add it before:
`nrl.assign(batch, episode_shares=nrl.algos.episode_shares(batch))`. A loss of your own hands the shares on, as in
`seq_mean(x, mask, episode_shares(batch))`, and counts rows without them. An aggregate of your own gets them if it is
declared with `by_episode`.

Losses of a language model read `logprobs`, `entropy` and a teacher's tokens. Losses of a model with `head="value"` or
`head="reward"` read `values` or `rewards`. The same trainers compute the columns: `critic.values(params, batch)` for
`episode_gae`, `teacher.top_k(params, batch, k)` for `distillation_loss`.

## A loss of your own

A loss is any function `(out, batch) -> (Mean, metrics)`. It gets `out["logprobs"]`, and declares with `needs` what else
it reads. `help(nrl.algos.output_shape)` lists all outputs with their shapes. A number for each token that is a function
of the logits over the whole vocabulary is declared with `from_logits`. Here are z-loss and label smoothing:

```python
import nrl
from nrl import data, tiny
from nrl.algos import add, from_logits, needs, sft_loss, token_mean
from nrl.backends import adamw, fsdp


def log_normalizer(logits):  # [N, V] -> [N]
    return logits.logsumexp(-1)


def smoothed(logits, input_ids):  # each token, with the column that from_logits names
    logprobs = logits.log_softmax(-1)
    return -0.9 * logprobs.gather(-1, input_ids[:, None])[:, 0] - 0.1 * logprobs.mean(-1)


LOG_Z, SMOOTHED = from_logits(log_normalizer), from_logits(smoothed, "input_ids")


@needs(LOG_Z)
def z_loss(out, batch):
    return token_mean(out[LOG_Z].square(), batch["loss_mask"]), {}


@needs(SMOOTHED)
def label_smoothing(out, batch):
    return token_mean(out[SMOOTHED], batch["loss_mask"]), {}


with nrl.cluster("local") as cluster:
    trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
    batch = data.supervised([{"prompt": "1+1=", "response": "2"}], tiny.tokenizer())
    step = trainer.train_step(add((1.0, label_smoothing), (1e-4, z_loss)))
    state, metrics = step(trainer.init(), batch)
```

The functions are called on chunks of tokens, and again in the backward. So the matrix `[tokens, vocabulary]` is never
held, under tensor parallelism either. `from_logits(fn, k=3)` declares three numbers a token.

`@needs("logits")` gives a loss the matrix itself, `out["logits"]` `[*B, T, V]`, and `@needs("hidden_states")` the last
hidden states after the final norm, `[*B, T, H]`, in float32. Position t describes token t, as everywhere: these are the
distribution from which token t was drawn, under the row's temperature, and the state that the head computed it from,
which is the state at token t - 1. Position 0 is zeros.

```python
@needs("logits")
def z_loss_of_the_matrix(out, batch):
    return token_mean(out["logits"].logsumexp(-1).square(), batch["loss_mask"]), {}


with nrl.cluster("local") as cluster:
    trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
    _, expected = trainer.train_step(z_loss)(trainer.init(), batch)
    _, found = trainer.train_step(z_loss_of_the_matrix)(trainer.init(), batch)
    assert abs(nrl.finalize(found.result())["loss"] - nrl.finalize(expected.result())["loss"]) < 1e-4
```

A step with it holds about six times the logits of a micro-batch, padding counted: of 4,096 tokens by 151,936 words six
times 2.3 GiB. Logits of a micro-batch, or of the rows of a forward, that take more than 8 GiB are refused. On a smaller
device lower the trainer's `max_tokens`, which bounds the tokens of a micro-batch. The driver learns the weight of such
a loss from outputs that have a shape and no numbers; a loss that looks at their numbers outside of tensor operations,
as `if (out["logits"] > 0).any()` does, is called on zeros of the whole batch, which is slow over a large vocabulary.
That rows are independent is checked on a few short ones. `nrl plan` counts neither logits nor hidden states.

## Compositions

Each line names the estimator (where the method has one), the loss, and what else the method needs.
"""

RECIPES = {
    "GRPO": ("from_rewards(group_normalize)", "policy_loss(clip(0.2), penalty=kl(k3, 0.04), aggregate=seq_mean)", ""),
    "Dr. GRPO": ("from_rewards(group_center)", "dr_grpo_loss(norm=4096)", ""),
    "DAPO": (
        "from_rewards(group_normalize)",
        "dapo_loss",
        "`overlong_penalty(20480, 4096)` before, and `nrl.drop_uniform` around the stream",
    ),
    "GSPO": ("from_rewards(group_normalize)", "gspo_loss", ""),
    "CISPO": ("from_rewards(group_normalize)", "cispo_loss", ""),
    "RLOO": ("from_rewards(leave_one_out)", "reinforce_loss", "`penalized_rewards(batch, kl(k1, 0.03))` before"),
    "REINFORCE++": ("reinforce_plus_plus", "policy_loss(clip(0.2))", "`token_rewards(batch, kl(k1, 0.01))` before"),
    "REINFORCE++, with a baseline": (
        "whitened(from_rewards(group_center))",
        "policy_loss(clip(0.2), penalty=kl(k2, 0.001))",
        "",
    ),
    "ReMax": ("greedy_baseline", "reinforce_loss", "a greedy row in each group, and `mask_greedy` after"),
    "GMPO": ("from_rewards(group_normalize)", "gmpo_loss", ""),
    "SAPO": ("from_rewards(group_normalize)", "sapo_loss", ""),
    "GDPO": ("gdpo(weights=(1.0, 0.5))", "policy_loss(clip(0.2), aggregate=seq_mean)", "several rewards a row"),
    "MaxRL": ("from_rewards(max_rl)", "reinforce_loss", "rewards of 0 and 1"),
    "OPO": ("optimal_baseline", "reinforce_loss", "one update a batch"),
    "Lite PPO": ("from_rewards(group_center_batch_std)", "policy_loss(clip(0.2))", ""),
    "PPO, with a critic": (
        "",
        "policy_loss(clip(0.2))",
        "`token_rewards(batch, kl(k1, 0.01))` and `episode_gae` before, and `value_loss(clip=0.2)` for the critic",
    ),
    "PPO, dual clip": ("from_rewards(group_normalize)", "policy_loss(clip(0.2, dual=3.0))", ""),
    "DPPO": ("from_rewards(group_center)", "dppo_loss", ""),
    "VESPO": ("from_rewards(group_center)", "vespo_loss", ""),
    "decoupled PPO": ("from_rewards(group_normalize)", "decoupled_ppo_loss", "`old_logprobs` from `trainer.logprobs`"),
    "TIS": (
        "from_rewards(group_normalize)",
        "policy_loss(clip(0.2), correction=truncate(2.0))",
        "`old_logprobs` from `trainer.logprobs`",
    ),
    "sequence TIS": (
        "from_rewards(group_normalize)",
        "policy_loss(clip(0.2), correction=sequence_truncate(2.0))",
        "`old_logprobs` from `trainer.logprobs`",
    ),
    "IcePop": (
        "from_rewards(group_normalize)",
        "policy_loss(clip(0.2), correction=icepop(0.5, 5.0))",
        "`old_logprobs` from `trainer.logprobs`",
    ),
    "geometric rejection": (
        "from_rewards(group_normalize)",
        "policy_loss(clip(0.2), correction=times(truncate(2.0), sequence_mask(0.999, 1.002)))",
        "`old_logprobs` from `trainer.logprobs`",
    ),
    "OPSM": ("from_rewards(group_normalize)", "policy_loss(clip(0.2), keep=opsm(0.5))", ""),
    "unbiased KL": (
        "from_rewards(group_normalize)",
        "policy_loss(clip(0.2), penalty=importance_weighted(kl(k3, 0.001)))",
        "",
    ),
    "entropy bonus": ("from_rewards(group_normalize)", "add((1.0, grpo_loss), (-0.01, entropy_loss))", ""),
    "the 80/20 rule": ("from_rewards(group_normalize)", "dapo_loss", "`top_entropy(0.2)` after"),
    "on-policy distillation": (
        "on_policy_distillation",
        "policy_loss(reinforce, ratio=on_policy_ratio)",
        "`teacher_logprobs`, and one update a batch",
    ),
    "GKD": ("", "distillation_loss(jsd(0.5))", "`teacher_ids` and `teacher_topk_logprobs`"),
    "KTO": ("", "kto_loss(0.1)", "`ref_logprobs`, and `reference_point` of mismatched answers"),
    "rejection-sampling fine-tuning": ("", "sft_loss", "`keep_at_least(1.0)` or `keep_best` before"),
}
"""Of each method: its estimator, its loss, and the other steps or columns that it needs."""


def recipes() -> Iterator[str]:
    """A list of the methods; evaluates each expression, so that every name in it exists."""
    for method, (estimator, loss, around) in RECIPES.items():
        for expression in filter(None, (estimator, loss)):
            assert callable(eval(expression, {"nrl": nrl} | vars(nrl.algos))), expression
        parts = [f"`{estimator}`"] if estimator else []
        text = f"- **{method}**: {', '.join([*parts, f'`{loss}`'])}."
        yield from lines(f"{text} Needs {around}." if around else text, hanging="  ")
    yield ""


def main(check: bool) -> int:
    """Write the page, or check that it is up to date."""
    page = "\n".join([HEAD, *recipes(), *written()]) + "\n"
    if not check:
        PAGE.write_text(page)
        return 0
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    sys.stderr.write("docs/losses.md is not what the docstrings say; run `python docs/make_losses.py`\n")
    return 1


class Entry(NamedTuple):
    """A method as its docstring describes it."""

    name: str
    arguments: str
    summary: str
    equation: str
    source: str


def sections() -> Iterator[tuple[str, list[Entry]]]:
    """The methods under each title."""
    folder = Path(__file__).parents[1] / "nrl" / "algos"
    there = {path.stem for path in folder.glob("[!_]*.py")} - {*OTHERS}
    listed = [module for modules in SECTIONS.values() for module in modules]
    if missing := there ^ set(listed):
        raise SystemExit(f"docs/make_losses.py: SECTIONS and nrl/algos/ differ in {', '.join(sorted(missing))}")
    for title, modules in SECTIONS.items():
        loaded = [importlib.import_module(f"nrl.algos.{name}") for name in modules]
        values = [(public, getattr(module, public)) for module in loaded for public in module.__all__]
        yield title, [entry(name, value) for name, value in values if callable(value) and not isinstance(value, type)]


def entry(name: str, value: Any) -> Entry:
    """Read a docstring: its first line, its first indented block, and its source."""
    doc = inspect.cleandoc(value.__doc__ or "")
    summary, _, rest = doc.partition("\n")
    equations = re.findall(r"(?:^    .*\n?)+", rest.split("\nArgs:")[0].split("\n>>>")[0], re.MULTILINE)
    equation = inspect.cleandoc(equations[0]).replace("``", "") if equations else ""
    found = re.search(r"^Sources?: (.+?)(?:\n\n|\Z)", doc, re.MULTILINE | re.DOTALL)
    return Entry(name, arguments(value), summary, equation, " ".join(found[1].split()) if found else "")


def written() -> Iterator[str]:
    """The lines of all sections."""
    for title, entries in sections():
        yield f"## {title}\n"
        yield from lines(", ".join(f"[`{each.name}`](#{each.name})" for each in entries) + ".")
        for each in entries:
            yield f"\n### `{each.name}`\n"
            signature = f"`{each.name}{each.arguments}`: " if each.arguments else ""
            yield from lines(signature + each.summary.replace("``", "`"))
            if each.equation:
                yield f"\n```text\n{each.equation}\n```"
            if each.source:
                yield ""
                yield from lines(f"Source: {linked(each.source)}")
        yield ""


def lines(text: str, hanging: str = "") -> list[str]:
    """Text in lines of 120 columns that break no code."""
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    wrapped = textwrap.wrap(whole, 120, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in wrapped]


def arguments(value: Any) -> str:
    """The arguments of a factory; nothing for a function that is a part or a loss itself."""
    parameters = inspect.signature(value).parameters.values()
    names = {each.name for each in parameters}
    if names & {"out", "batch", "logprobs", "log_ratio", "x", "rewards", "student"}:
        return ""
    return f"({', '.join(each.name for each in parameters)})"


def linked(text: str) -> str:
    """A source as Markdown."""
    return re.sub(r"https?://(?:www\.)?(?:arxiv\.org/abs/)?([^\s,;]+)", link, text.replace("``", "`"))


def link(found: re.Match[str]) -> str:
    """A web address, shortened if it is arXiv's."""
    address, short = found[0].rstrip("."), found[1].rstrip(".")
    shown = f"arXiv:{short}" if "arxiv.org/abs" in address else short
    return f"[{shown}]({address}){'.' if found[0].endswith('.') else ''}"


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
