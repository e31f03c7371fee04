"""Long runs, and what they weigh: `make soak`."""
