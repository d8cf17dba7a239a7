"""A loss on a mesh: its terms and their weights, checks of it and of its batch, its gradient."""
