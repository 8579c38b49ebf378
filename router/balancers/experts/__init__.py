"""Where experts and their replicas lie: planned from tokens per step, put in place by epochs. See README.md.

It knows counts, ranks, nodes and what a move costs. It must not know weights, collectives or how a plan is carried out.
"""
