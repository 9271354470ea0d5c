"""The members of a job, and the outcome of the calls that a loss breaks off.

The rules, without I/O and clocks, so that a simulation can drive them:
    membership   what every message and every moment changes
    epochs       forms one epoch after the other
    assembly     how a job comes together: at its start, and after the coordinator's
    epoch_state  one epoch: members, losses, accusations, reports
    verdicts     what reports and accusations mean
    exchanges    small values that all ranks of an epoch give each other
    outbox       messages that wait to be sent
Around them:
    coordinator  the server of a job
    client       a rank's end, which speaks to it
    orders       what a rank is told
    connection   the connection between the two, which may outlive the server
    rendezvous_discovery  how ranks find the coordinator

How a rank follows an epoch is in world/recovery.py and world/epoch_sequence.py, one
level up.
"""
