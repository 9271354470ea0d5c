"""`ringjax top`: shows the ranks of a running job, in another terminal of its user."""
