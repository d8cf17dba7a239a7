"""The parts that all samplers share: the pool of engines, routing of requests, receiving of weights."""
