"""`ringjax top`: a running job, looked at from another terminal of the same user."""
