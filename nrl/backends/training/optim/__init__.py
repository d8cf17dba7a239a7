"""Optimizers and learning-rate schedules, as frozen data and as the mathematics that engines share."""
