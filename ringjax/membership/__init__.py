"""Who belongs to an elastic job, and what becomes of the calls that a loss breaks off.

The rules, without I/O and clocks, so that a simulation can drive them:
    membership   what every message and every moment changes
    epochs       forms one epoch after the other
    assembly     how a job comes together: at its start, and after the coordinator's
    epoch_state  one epoch: members, losses, accusations, reports
    verdicts     what reports and accusations mean
    outbox       messages that wait to be sent
Around them:
    coordinator  the server of a job
    enlistment   a worker's end, which speaks to it
    orders       what a worker is told
    lifeline     the connection between the two, which outlives the server

How a rank follows an epoch is in recovery/thread.py and recovery/elastic_world.py, one
level up.
"""
