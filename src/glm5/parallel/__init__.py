"""Training past one device, as decoration: the model and the step stay as they are, their parts are placed on ranks.

Engine: torch.distributed with DTensor, FSDP2 and distributed checkpoints, started by torchrun. Source: report section
2.4. Read first: `mesh`; then `shard` (data parallel), `expert`, `tensor`.
"""
