"""From a JSON Schema to a grammar that accepts exactly its instances, or a refusal that says why (README.md)."""
