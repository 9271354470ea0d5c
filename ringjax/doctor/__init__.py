"""`ringjax doctor`: what would keep a job from starting or from being fast, before it.

Each check is a function and a row of `checks.CHECKS`. `survey.py` brings those that
look at one host there as ringrun brings its ranks; nothing here mends anything.
"""
