"""Functions called elsewhere: in a pool of processes (`nrl.pooled`) or on a mesh (`nrl.on`)."""
