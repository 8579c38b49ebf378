"""The POSIX segment engine: append-only segment files on a local disk or a mounted file system (spec/kv_tier.md).

engine.py        the Store                     parts.py          what it is made of, put together

Bytes    record.py      a record                sidecar.py        footer and `.idx` of a sealed segment
         names.py       where a segment lies    recovery.py       what a segment tells
         records.py     what all of them tell   scrub.py          whether all of it is whole
Writing  intake.py      what is accepted        pending.py        accepted, not yet durable
         copies.py      into memory of ours     writes.py         threads that write runs
         writer.py      queue → segments        groups.py         what it hands on
         open_segment.py  append, sync, seal    commit.py         sync → index → events
         native/        copies and writes in C++
Reading  reads.py       what may be shown       reader.py         rows → verified payloads
         handles.py     open files              buffers.py        memory for direct IO
Leaving  sweeper.py     expiry, the election    unlinking.py      out of sight, then off the disk
         erasing.py     drops                   erasures.py       who was erased
Others   writers.py     who lives               adoption.py       what the dead left
         own_segments.py  what this process has open
Keeping  table.py       sizes of segments       uses.py           what was used, by whom
         quotas.py      what may be written     disk_use.py       what the files take
         relief.py      pressure eviction       rewriter.py       refreshes and pins

All IO goes through store/files.py. Must not know requests, tokens, sockets or torch; what lives how long is decided in
store/retention/.
"""
