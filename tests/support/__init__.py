"""What tests stand on: jobs of ranks, what they leave behind, stubs, strangers."""
