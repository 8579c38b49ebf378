"""Parts of bench.index_memory, and what bench.router_speed takes from it."""
