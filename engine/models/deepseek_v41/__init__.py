"""DeepSeek-V4.1 family: hyper-connections, compressed sparse attention, Engram, MoE."""
