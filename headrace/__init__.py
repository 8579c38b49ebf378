"""Headrace: a serving system for DeepSeek-class models.

The code folders stand at the top of the repository; this package links to them, so that
``from headrace.router import …`` resolves alike in an editable install, a wheel and the tools.
"""
