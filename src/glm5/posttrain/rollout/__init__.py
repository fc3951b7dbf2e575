"""Rollouts of many agent tasks at once: tasks are services (`glm5.agents.protocol`), what they give goes to the store.

Read next: `orchestrator`; `steering` for the rule of shares and speeds.
"""
