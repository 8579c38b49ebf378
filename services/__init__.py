"""The processes of the system, one folder each, and the runtime they share."""
