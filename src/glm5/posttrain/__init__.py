"""From a base model to an assistant: fine-tuning on conversations, the losses and advantages of reinforcement learning,
and verifiers. Read next: `chat_data` and `sft`; `losses`, `advantage`, `rows`; `prompts`, `verify`."""
