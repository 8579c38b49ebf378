"""Parts of bench.structured: our schemas, what a model writes under them, and the masks of two libraries."""
