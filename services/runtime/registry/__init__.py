"""Membership: one interface, embedded and etcd implementations."""
