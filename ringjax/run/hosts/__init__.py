"""The hosts of a job: finds them, starts ranks on them, and exchanges messages."""
