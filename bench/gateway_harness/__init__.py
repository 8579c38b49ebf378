"""What bench.gateway is made of: a router that only talks, and two kinds of clients."""
