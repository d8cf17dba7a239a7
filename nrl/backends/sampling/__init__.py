"""The parts that all samplers share.

`pool` is the sampler and a request's way through it; `seat` the engines of a mesh, their state and who waits for them;
`routing` says which engine is asked, `receiving` how new weights reach them, and `checks` what is refused beforehand.
"""
