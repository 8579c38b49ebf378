"""The fuzzer of every port (laws L1, L7, L10, L11, L13, L25): mutated messages and forged transfer handles against a
real cluster with mutual TLS, by callers who are let in.

`python -m tests.fuzz --help`, or `./build.sh fuzz`; docs/reliability.md says what it covers.

- mutate.py, wire_bytes.py: from a valid message to a bad one; pure
- methods.py: every method of every service, from the descriptors
- world.py: the cluster, its identities, what is known about it
- seeds.py, seeds_decode.py: a valid message of each method, made for now
- send.py: one call and what came of it
- campaign.py, handles.py: all messages; all handles
- watch.py, canary.py: processes, logs, pools; answers that are known
- verdict.py: what counts as a violation; pure
"""
