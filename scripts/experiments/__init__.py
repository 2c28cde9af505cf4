"""What scripts/*.sh start: trainings one after the other, what is finished skipped, and their tables."""
