"""Training: one loop; objectives, optimisers, schedules, data and checkpoints are passed into it."""
