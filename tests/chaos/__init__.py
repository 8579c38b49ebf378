"""Chaos: a cluster of real processes is hurt on purpose while clients whose right answers are known ask it things.

python -m tests.chaos --minutes 10 --json        (or ./build.sh soak)

schedule   what happens when, and who asks what: pure functions of the seed
processes  the cluster: each process behind a proxy, and started again when it was killed
proxy      a TCP proxy that delays, drops, truncates and half-closes
faults     does what the schedule says, as soon as every role keeps a sound replica
requests   what is asked; clients: who asks, and resumes where its router dies
checker    one request as its client sees it, and the books of all: no sockets, no clock
leaks      what is left at the end
results    the bars, and what is printed
"""
