"""The hosts of a job: finds hosts, starts ranks on them, and exchanges messages."""
