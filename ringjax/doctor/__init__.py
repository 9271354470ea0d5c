"""`ringjax doctor`: finds, before a job, problems that would stop it or slow it down.

Each check is a function and a row of `checks.CHECKS`. survey.py starts the
checks of each host on that host, as ringrun starts ranks. No check changes anything.
"""
