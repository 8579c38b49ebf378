"""Plain torch references of every operator; the meaning of the faster backends."""
