"""What a job does while it runs: its calls, who waits for whom, and where they go."""
