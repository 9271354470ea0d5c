"""`ringjax doctor`: finds, before a job, what would make it fail or slow.

Each check is a function and a row of `checks.CHECKS`. survey.py starts the checks of a
host there, in the way in which ringrun starts ranks. No check changes anything.
"""
