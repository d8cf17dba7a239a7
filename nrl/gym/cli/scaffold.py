"""``nrl gym init``: a folder with an environment of a few lines, its test, a page and a configuration."""

import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nrl.errors import ConfigError

__all__ = ["USAGE", "init"]

USAGE = """usage: nrl gym init NAME

Write a folder NAME with an environment of a few lines, its test, a page and a configuration. What is there already is
not touched. NAME may be a path, whose last part is a name of Python."""

_ENVIRONMENT = '''"""Guess a number from 1 to 99; each answer says whether it is higher or lower."""

import random

from nrl.envs import Environment, Step

TURNS = 7


def tasks(seed, index):
    """The task of an index: the same whenever it is asked for."""
    number = random.Random(f"{seed} {index}").randint(1, 99)
    return {"prompt": f"Guess a number from 1 to 99, in {TURNS} turns. Write it alone: ", "number": number}


def reset(task):
    """The state in which an episode begins, and what the policy reads first."""
    return (task["number"], TURNS), task["prompt"]


def step(state, turn):
    """The next state, and either what the policy reads next or, at the end, its reward."""
    number, left = state
    text = turn.text.strip()
    guess = int(text) if text.isascii() and text.isdigit() and len(text) < 3 else None
    if guess == number or left == 1:
        return Step(state, reward=float(guess == number))
    hint = "a number, please" if guess is None else "higher" if guess < number else "lower"
    return Step((number, left - 1), done=False, observation=f"\\n{hint}: ")


env = Environment(reset, step, tasks=tasks)
'''
_TEST = '''"""The environment without a model: a step is a function of a state and a text."""

from NAME import TURNS, reset, step, tasks
from nrl.envs import Turn


def play(task, policy):
    """The reward of a policy, which is a function of what it has read since its last guess."""
    state, read = reset(task)
    for turns in range(1, TURNS + 1):
        state, reward, done, read = step(state, Turn(policy(read)))[:4]
        if done:
            return reward, turns
    raise AssertionError("an episode has no more turns than this")


def halving():
    """A policy that guesses the middle of what is left."""
    low, high, guess = 1, 99, 0

    def policy(read):
        nonlocal low, high, guess
        if "higher" in read:
            low = guess + 1
        elif "lower" in read:
            high = guess - 1
        guess = (low + high) // 2
        return str(guess)

    return policy


def test_who_listens_finds_every_number():
    for number in range(1, 100):
        assert play({"prompt": "", "number": number}, halving())[0] == 1.0


def test_nonsense_is_answered_and_earns_nothing():
    for text in ("", "no idea", "1 2 3 4 5", "-5", "5.0", "9" * 10_000, "\\N{SUPERSCRIPT TWO}"):
        assert play({"prompt": "", "number": 5}, lambda read, text=text: text) == (0.0, TURNS)


def test_a_seed_has_the_same_tasks_every_time():
    assert [tasks(0, i) for i in range(9)] == [tasks(0, i) for i in range(9)]
    assert [tasks(0, i) for i in range(9)] != [tasks(1, i) for i in range(9)]
'''
_PAGE = """# NAME

Guess a number from 1 to 99 in 7 turns. After each guess the environment says whether the number is higher or lower.
The reward is 1 if the number is found, else 0.

```sh
pytest                       # the rules, without a model
nrl gym test NAME.py:env     # what lazy and hostile policies earn
nrl gym run gym.yaml         # serve it
nrl gym status               # in another terminal
nrl eval model=Qwen/Qwen3-0.6B env=NAME.py:env limit=8   # let a model play it
```

Train against it while it is served, with an example in a checkout of nrl:

```sh
python NRL/examples/grpo.py env=gym.yaml warmup=0               # the tiny model
python NRL/examples/grpo.py env=gym.yaml model=Qwen/Qwen3-0.6B  # a real one
```

`warmup=0`, since the tiny model begins with right answers elsewhere, and the tasks here have none. It shows that all
fits together, and earns nothing: it has not learned to read.

- `NAME.py` is the environment: `reset`, `step` and `tasks` are functions of what they are given, of nothing else.
- `test_NAME.py` plays it with policies that are functions.
- `gym.yaml` says how it is served: how many replicas, where, in which Python environment.
- Secrets, such as `policy_api_key: ...`, belong into `env.yaml`, which `.gitignore` leaves out.
"""
_CONFIG = """# nrl gym run gym.yaml servers.NAME.replicas=4
servers:
  NAME:
    environment: NAME.py:env
    replicas: 1
"""


def init(args: Sequence[str]) -> int:
    """Write a new environment.

    Args:
        args: its name, or a path that ends in it.

    Raises:
        ConfigError: it is no name of Python, or the name of a module of Python's own, or the folder is there.

    >>> init(["random"])
    Traceback (most recent call last):
    nrl.errors.ConfigError: gym init: random is a module of Python's own, which the new file would hide; choose ...
    """
    if len(args) != 1 or "=" in args[0] or args[0].startswith("-"):
        raise ConfigError(f"gym init: found {' '.join(args) or 'no name'}; give one name, as in nrl gym init guess")
    folder = Path(args[0]).expanduser()
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"gym init: {name!r} cannot name a file of Python; use small letters, digits and _")
    if name in sys.stdlib_module_names or name in ("nrl", "torch"):
        owner = "a module of Python's own" if name in sys.stdlib_module_names else "a package that is needed here"
        raise ConfigError(f"gym init: {name} is {owner}, which the new file would hide; choose another name")
    if folder.exists():
        raise ConfigError(f"gym init: {folder} is there already, and nothing of it was touched; choose another name")
    folder.mkdir(parents=True)
    files = {
        f"{name}.py": _ENVIRONMENT, f"test_{name}.py": _TEST, "README.md": _PAGE, "gym.yaml": _CONFIG,
        ".gitignore": "env.yaml\n__pycache__/\ngym_test.jsonl\nruns/\n",
    }  # fmt: skip
    for file, text in files.items():
        (folder / file).write_text(text.replace("NAME", name))
    print(
        f"{folder} has {', '.join(files)}. Try it:\n  cd {shlex.quote(str(folder))} && pytest && nrl gym run gym.yaml"
    )
    return 0
