"""ringrun's picture of its job, and who may look at it: a report, metrics, a view.

What the ranks tell comes through the agents of their hosts (hosts/tellers.py), only
while somebody wants to know; what is made of it is in ringjax.monitor. Whatever goes
wrong here, the job goes on.
"""
