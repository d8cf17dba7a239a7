"""Operations: whether a machine can run nrl, what a run will need, and how to start it on a cluster."""
