# mypy: ignore-errors
"""An environment for a Python that has verifiers 0.1: sums, asked once, twice, or with a tool."""

import verifiers as vf
from datasets import Dataset


def right(completion, answer, **more):
    text = completion[-1]["content"] if completion else ""  # there is no message of an empty answer
    if "raise" in text:
        raise RuntimeError("oh")
    return float(answer in text)


def short(completion, **more):
    return 1 / (1 + len(completion))


def best(completions, **more):
    return [1.0] * len(completions)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    print("what a tool prints is no answer", flush=True)
    return a + b


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        if "break" in messages[-1]["content"]:
            raise vf.InfraError("the sandbox is gone")
        return [{"role": "user", "content": "Are you sure?"}]


def load_environment(kind="once", count=3):
    if kind == "none":
        raise KeyError("there is no such kind")
    rows = Dataset.from_list([{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(count)])
    rubric = vf.Rubric(
        funcs=[best] if kind == "group" else [right, short], weights=None if kind == "group" else [1, 0.5]
    )
    if kind == "twice":
        return Twice(dataset=rows, max_turns=2, rubric=rubric)
    if kind == "tool":
        return vf.ToolEnv(dataset=rows, tools=[add], max_turns=4, rubric=rubric)
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows.select([1]), system_prompt="Add.", rubric=rubric)
