"""The parts that all samplers share.

`pool` is the sampler and a request's way through it; `seat` has the engines of a mesh, their state and their requests;
`routing` chooses an engine for a request, `weights` brings new weights to engines, and `request_checks` refuses
requests that no engine could complete.
"""
