"""Which backend serves a stage, and why the others do not."""
