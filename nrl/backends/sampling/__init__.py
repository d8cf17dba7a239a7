"""The parts that all samplers share.

`pool` is the sampler and a request's way through it; `seat` the engines of a mesh, their state and who waits for them;
`routing` says which engine is asked, `weights` how new ones reach them, and `request_checks` what is refused.
"""
