"""C++ kernels for CPUs, compiled on the machine they run on (build): a whole step of an MLA decoder in one call (mla).

Why they exist, measured on a 2-core machine with AVX2 and no bf16 instructions, one thread: torch's bf16 product runs
at 9 GFLOP/s whatever the number of rows; here 8 rows run at 45 and 540 rows at 85. Where no compiler is found the torch
reference serves, and the loaded model says so (``backend``).
"""
