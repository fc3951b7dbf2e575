"""Training: schedules, losses, the optimizer, checkpoints, the loop that joins them, and whole stages made of it.

Read `schedule`, `losses`, `optim` and `checkpoint` first (each stands alone), then `loop`; then `pretrain`, `sparsify`
and `reproduce`, which are what the commands run.
"""
