"""Tables and figures, from results only."""
