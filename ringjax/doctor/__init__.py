"""`ringjax doctor`: finds, before a job, problems that would stop it or slow it down.

Each check is a function and a row of the table `checks.CHECKS`. survey.py runs the host
checks on every host, as ringrun starts ranks. No check changes the system.
"""
