"""One module per family of golden cases; each registers its runner on import."""
