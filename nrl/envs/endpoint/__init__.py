"""The model as an endpoint: OpenAI's Chat Completions and Responses, answered by whoever samples.

An agent that somebody else wrote asks a model over HTTP. `driven` turns it into an environment: what it asks is what
the policy sees, and what the policy says is what it gets.
"""
