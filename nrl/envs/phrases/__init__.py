"""Words around what an answer or a verdict says."""
