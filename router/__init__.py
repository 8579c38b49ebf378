"""Decisions only: no sockets, no clock of its own, no torch."""
