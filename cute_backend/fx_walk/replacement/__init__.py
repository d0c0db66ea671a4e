"""What takes the place of a region in the graph, and the choice to leave it to Inductor."""
