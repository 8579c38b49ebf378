"""Parts of the GPU script: each measures or checks one thing; torch, numpy, safetensors, xxhash and NIXL suffice."""
