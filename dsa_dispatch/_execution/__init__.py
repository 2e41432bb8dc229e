"""Running a planned stage: canonical rows, legalized operands, chunks within the memory budget."""
