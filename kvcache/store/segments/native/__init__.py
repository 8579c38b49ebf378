"""C++ for the write path (library.py compiles and loads it): copies of payloads, checksums of headers, and the writes.

Why it exists, measured on a 2-core machine: a block's 16 µs of copying and every pwritev need the interpreter lock back
at their end, and beside threads that hold it for milliseconds the disk had nothing to do for a third of the time. Here
a whole batch is copied in one call, and threads that never take that lock write what waits for them. Over
file layers whose files are no descriptors (3FS) Python threads write what C++ copied; without a compiler Python does
both (writes.py, copies.py).
"""
