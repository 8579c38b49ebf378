"""The decode process: reservations, hand-overs, and the only emitter of tokens.

Read service.py (the calls), journal.py (what a router has yet to hear), attach.py (the streams), landing.py (the memory
that peers write). It knows prefill and the router by their contracts alone, never by their code.
"""
