"""The model as an endpoint: OpenAI's Chat Completions and Responses, answered by whoever samples.

An agent that somebody else wrote asks a model over HTTP. `driven` turns it into an environment: what it asks is what
the policy sees, and what the policy says is what it gets.

>>> Endpoint("http://127.0.0.1:8000/s/4f/v1", "4f").model
'policy'
"""

from nrl.gym.endpoint.agent_env import Endpoint, Start, driven
from nrl.gym.endpoint.agent_process import program

__all__ = ["Endpoint", "Start", "driven", "program"]
