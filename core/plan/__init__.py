"""The planner: which requests compute how many tokens in each step. Imports no torch."""
