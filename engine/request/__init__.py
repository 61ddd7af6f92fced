"""A request on the frontend's side: from a prompt to its output."""
