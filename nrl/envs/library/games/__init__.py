"""Games: environments of several turns whose tasks are functions of a seed and an index.

>>> from nrl.envs.library.games import tic_tac_toe
>>> from nrl.envs.library.games import noughts
>>> env = tic_tac_toe(opponent="random")
>>> state, prompt = env.reset(noughts.task(0, 0))
>>> env.step(state, "I take the tenth cell.").done
False
"""

from nrl.envs.library.games.noughts import tic_tac_toe
from nrl.envs.library.games.sliding import sliding_puzzle

__all__ = ["sliding_puzzle", "tic_tac_toe"]
