"""What every sampler shares: a pool of engines, how requests and weights reach them, and how they come back."""
