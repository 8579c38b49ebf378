"""Several routers over the same workers, and clients that hold their requests open."""
