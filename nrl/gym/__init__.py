"""The gym: environments as servers, and the command ``nrl gym``, which tries verifiers and environments out."""
