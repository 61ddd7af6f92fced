"""What attaches to the planner through its hooks: adapters, speculation. Imports no torch."""
