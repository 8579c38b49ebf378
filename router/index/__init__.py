"""Who holds which prefixes: fed by events of every tier, asked once per request. Knows keys, never tokens."""
