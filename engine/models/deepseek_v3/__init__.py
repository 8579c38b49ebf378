"""DeepSeek-V3 family: MLA and grouped MoE."""
