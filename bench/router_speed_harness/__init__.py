"""What bench.router_speed measures with: workers without an engine, clients, the decision alone, and Dynamo beside it.

Names that begin with Mock stand for something that computes nothing; whatever is measured over them says so.
"""
