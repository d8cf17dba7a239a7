"""What every train engine shares: the half of a step on the driver, the half in processes, terms, plans, outputs."""
