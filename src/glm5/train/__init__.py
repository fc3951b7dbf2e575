"""Training: schedules, losses, the optimizer, checkpoints, and the loop that joins them.

Read `schedule`, `losses`, `optim` and `checkpoint` first (each stands alone), then the loop.
"""
