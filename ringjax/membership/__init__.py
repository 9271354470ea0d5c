"""Decides which workers of a job have ranks, and what happens to interrupted calls.

These modules hold the rules, without I/O and clocks, so that a simulation can run them:
    membership        handles the events and messages of workers, and timeouts
    epochs            decides which workers get a rank, and forms each new epoch
    assembly          decides when a job begins, or continues under a new coordinator
    epoch_state       records members, lost ranks and reports of one epoch
    commit_decision   decides from the members' reports which calls are complete
    exchanges         collects small values that all ranks of an epoch exchange
These modules connect the rules to sockets, threads and files:
    coordinator       the server of a job, which runs the rules
    client            a worker's end of its connection to the coordinator
    directives        the commands that a worker receives from the coordinator
    connection        the socket of a client, which may reconnect after a loss
    joined_job        connects a worker and waits until its job starts
    job_credentials   the addresses, secret and job id that a rank needs to join
    init_warning      the line that `init` prints if a rank waits long to join
    rendezvous_discovery  finds the coordinator

world/recovery.py and world/epoch_sequence.py apply the directives on a rank.
"""
