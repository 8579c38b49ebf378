"""What engine workers and encoders share beyond the runtime: the engine behind asyncio, wire forms, reports. May import
torch; knows no role's code.
"""
