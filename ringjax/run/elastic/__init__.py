"""The launcher's part of elastic jobs: decides which workers to start, and when."""
