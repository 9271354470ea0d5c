"""Membership: who belongs to a job, and the outcome of calls that a loss breaks off.

The rules have neither I/O nor clocks, so that a simulation can run them:
    membership        what each message and each moment changes
    epochs            forms one epoch after another
    assembly          how a job comes together, first or under a new coordinator
    epoch_state       one epoch: members, losses, accusations, reports
    commit_decision   what reports and accusations decide
    exchanges         small values that all ranks of an epoch exchange
    outbox            messages that wait to be sent
Around them:
    coordinator       the server of a job
    client            a worker's end of the coordinator
    directives        what the coordinator tells a worker to do
    connection        between the two; it may outlive the server
    joined_job        connects a worker and waits until its job starts
    job_credentials   what a rank must know to join
    init_warning      the line about a rank that waits long to join
    rendezvous_discovery  how ranks find the coordinator

How a rank follows an epoch is in world/recovery.py and world/epoch_sequence.py.
"""
