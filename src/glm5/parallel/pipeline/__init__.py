"""Pipeline parallelism for training: stages, schedules, and the report's savings of memory and idle time.

Read first: `engine`, what a trainer calls; then `layout`, `stage`, `schedule`, `deferred`.
"""
