"""Environments and verifiers: ordinary functions, called in this process, elsewhere or behind HTTP.

>>> from nrl.envs import Task, number, single_turn
>>> env = single_turn(number)
>>> state, prompt = env.reset({"prompt": "What is 6 * 7?", "answer": "42"})
>>> env.step(state, r"6 * 7 is \\boxed{42}.").reward
1.0
"""

from nrl.envs.contract import Env, Environment, Message, Prompt, Step, Task, Turn, Verifier, by_source, single_turn
from nrl.envs.verifiers import (
    VERIFIERS,
    Extractor,
    exact,
    extractor,
    extracts,
    final_number,
    number,
    number_or_wrong,
)

__all__ = [
    "VERIFIERS",
    "Env",
    "Environment",
    "Extractor",
    "Message",
    "Prompt",
    "Step",
    "Task",
    "Turn",
    "Verifier",
    "by_source",
    "exact",
    "extractor",
    "extracts",
    "final_number",
    "number",
    "number_or_wrong",
    "single_turn",
]
