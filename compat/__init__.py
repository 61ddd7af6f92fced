"""Call forms and names of other engines, and nothing else."""
