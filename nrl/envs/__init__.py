"""Environments and verifiers: ordinary functions, called in this process, elsewhere or behind HTTP.

>>> from nrl.envs import Task, exact, single_turn
>>> env = single_turn(exact)
>>> state, prompt = env.reset({"prompt": "What is 6 * 7?", "answer": "42"})
>>> env.step(state, " 42 ").reward
1.0
"""

from nrl.envs import tools
from nrl.envs.final_numbers import final_number
from nrl.envs.library.code import code
from nrl.envs.library.games import sliding_puzzle, tic_tac_toe
from nrl.envs.library.ifeval import CONSTRAINTS, constraints
from nrl.envs.library.multiple_choice import choice, chosen_letter
from nrl.envs.library.python_tool import Interpreter, python
from nrl.envs.library.search.ranking import Ranker, bm25
from nrl.envs.library.search.searches import Passage, search, searching
from nrl.envs.library.search.short_answers import short_answer
from nrl.envs.limits import limited
from nrl.envs.linear_states import LinearState, linear
from nrl.envs.return_values import score_of
from nrl.envs.rubric import by_source, gated, judged, of_group, product, single_turn, weighted
from nrl.envs.sandbox import Finished, Limits, Sandbox, bubblewrap
from nrl.envs.types import (
    STATUSES,
    Env,
    Environment,
    Message,
    Prompt,
    Score,
    Step,
    Task,
    Trace,
    Turn,
    Verdict,
    Verifier,
)
from nrl.envs.verifiers import (
    VERIFIERS,
    Extractor,
    exact,
    extractor,
    extracts,
    number,
    number_or_wrong,
)

__all__ = [
    "CONSTRAINTS",
    "STATUSES",
    "VERIFIERS",
    "Env",
    "Environment",
    "Extractor",
    "Finished",
    "Interpreter",
    "Limits",
    "LinearState",
    "Message",
    "Passage",
    "Prompt",
    "Ranker",
    "Sandbox",
    "Score",
    "Step",
    "Task",
    "Trace",
    "Turn",
    "Verdict",
    "Verifier",
    "bm25",
    "bubblewrap",
    "by_source",
    "choice",
    "chosen_letter",
    "code",
    "constraints",
    "exact",
    "extractor",
    "extracts",
    "final_number",
    "gated",
    "judged",
    "limited",
    "linear",
    "number",
    "number_or_wrong",
    "of_group",
    "product",
    "python",
    "score_of",
    "search",
    "searching",
    "short_answer",
    "single_turn",
    "sliding_puzzle",
    "tic_tac_toe",
    "tools",
    "weighted",
]
