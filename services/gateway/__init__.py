"""The HTTP gateway: Chat Completions, Completions, Responses and Messages over the routers' gRPC.

It knows tokenizers and prompt forms (engine/text), the wire, and no tensor. One router per served model; who calls is
the router's to judge: the client's key is handed on (L25).
"""
