"""The parts that all train engines share: both halves of a step, terms of a loss, plans of micro-batches."""
