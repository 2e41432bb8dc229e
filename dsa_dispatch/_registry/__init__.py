"""Who is there: backends, the plugins that bring them, and whether they can be used on this machine."""
