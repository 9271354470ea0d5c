"""`ringjax top` shows the ranks of a running job, like top shows processes."""
