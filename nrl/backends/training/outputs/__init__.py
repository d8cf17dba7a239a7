"""Outputs of the head, which never materialize all logits at once."""
