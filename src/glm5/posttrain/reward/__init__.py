"""Rewards of the general stage: rules, a reward model, a judge, how they become one number, and what watches them.

Source: report, section 3.4, which names the three kinds of reward and their weaknesses, and gives neither weights nor
how they are combined: what is here of these is ours. Read next: `hybrid`; `rules`, `model`, `judge`; `monitors`.
"""
