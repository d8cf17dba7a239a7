"""The parts that all samplers share.

`pool` is the sampler and a request's way through it; `replica` has the engines of a mesh, their state and their
requests; `prefix_router` chooses an engine for a request, `weight_delivery` brings new weights to engines, and
`validation` refuses requests that no engine could complete.
"""
