"""From a base model to an assistant: fine-tuning, and the losses, updates and verifiers of reinforcement learning.

Read next: `chat_data` and `sft`; `losses`, `advantage`, `rows`, `update`; `prompts` and `verify`.
"""
