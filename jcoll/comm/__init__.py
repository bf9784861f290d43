"""Who takes part: groups of ranks, and the mesh axes that define them."""
